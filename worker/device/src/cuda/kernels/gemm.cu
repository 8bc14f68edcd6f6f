// Matrix products.

// A block of 16 x 16 threads computes a tile of 64 x 64 elements, 4 x 4 for each thread. It reads
// the operands through shared memory, 16 terms of the sums at a time.
#define TILE 64
#define DEPTH 16
#define SIDE 16
#define EACH 4
// Rows of the tiles are longer than they need to be, so that threads of a column use other banks.
#define PITCH (TILE + 4)

// Copies a tile of DEPTH x TILE elements. Element (term, line) is at `term * term_stride + line *
// line_stride`. Elements beyond the matrix are 0. Neighbouring threads read neighbouring elements.
__device__ __forceinline__ void load_tile(
    float tile[DEPTH][PITCH], const float *values, u64 first_line, u64 lines, u64 line_stride,
    u64 first_term, u64 terms, u64 term_stride) {
    u32 thread = threadIdx.y * SIDE + threadIdx.x;
    for (u32 step = 0; step < TILE * DEPTH / (SIDE * SIDE); step++) {
        u32 index = thread + step * SIDE * SIDE;
        u32 term, line;
        if (term_stride == 1) {
            term = index % DEPTH;
            line = index / DEPTH;
        } else {
            term = index / TILE;
            line = index % TILE;
        }
        float value = 0.0f;
        if (first_line + line < lines && first_term + term < terms)
            value = values[(first_line + line) * line_stride + (first_term + term) * term_stride];
        tile[term][line] = value;
    }
}

// Writes a * b + beta * product. The grid is one block for each tile: x over the columns, y over the
// rows, both with strides. With a beta of 0 the previous product is not read.
extern "C" __global__ void multiply(
    const float *a, u64 a_row_stride, u64 a_column_stride, const float *b, u64 b_row_stride,
    u64 b_column_stride, float beta, float *product, u64 rows, u64 inner, u64 columns) {
    __shared__ float left[DEPTH][PITCH];
    __shared__ float right[DEPTH][PITCH];
    u64 tile_rows = (rows + TILE - 1) / TILE, tile_columns = (columns + TILE - 1) / TILE;
    for (u64 tile_row = blockIdx.y; tile_row < tile_rows; tile_row += gridDim.y) {
        for (u64 tile_column = blockIdx.x; tile_column < tile_columns; tile_column += gridDim.x) {
            float sums[EACH][EACH];
            for (u32 i = 0; i < EACH; i++)
                for (u32 j = 0; j < EACH; j++) sums[i][j] = 0.0f;
            for (u64 term = 0; term < inner; term += DEPTH) {
                load_tile(left, a, tile_row * TILE, rows, a_row_stride, term, inner, a_column_stride);
                load_tile(right, b, tile_column * TILE, columns, b_column_stride, term, inner, b_row_stride);
                __syncthreads();
                for (u32 k = 0; k < DEPTH; k++) {
                    float x[EACH], y[EACH];
                    for (u32 i = 0; i < EACH; i++) {
                        x[i] = left[k][threadIdx.y + i * SIDE];
                        y[i] = right[k][threadIdx.x + i * SIDE];
                    }
                    for (u32 i = 0; i < EACH; i++)
                        for (u32 j = 0; j < EACH; j++) sums[i][j] += x[i] * y[j];
                }
                __syncthreads();
            }
            for (u32 i = 0; i < EACH; i++) {
                u64 row = tile_row * TILE + threadIdx.y + i * SIDE;
                for (u32 j = 0; j < EACH; j++) {
                    u64 column = tile_column * TILE + threadIdx.x + j * SIDE;
                    if (row < rows && column < columns) {
                        float *element = product + row * columns + column;
                        *element = beta == 0.0f ? sums[i][j] : sums[i][j] + beta * *element;
                    }
                }
            }
        }
    }
}
