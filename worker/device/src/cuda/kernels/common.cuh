// What all kernels share. The script puts it before each source: nothing is included.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

// Index of this thread in the grid, and the number of threads of the grid. Every loop over elements
// begins at the first and advances by the second, so each result is right for any grid.
__device__ __forceinline__ u64 first_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ u64 all_threads() {
    return (u64)gridDim.x * blockDim.x;
}
