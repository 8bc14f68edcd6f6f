// Operations on each element, and sums.

extern "C" __global__ void axpy(float factor, const float *x, float *y, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) y[i] = factor * x[i] + y[i];
}

extern "C" __global__ void add(const float *x, float *y, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) y[i] += x[i];
}

extern "C" __global__ void mul(const float *x, float *y, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) y[i] *= x[i];
}

extern "C" __global__ void div(const float *x, float *y, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) y[i] /= x[i];
}

extern "C" __global__ void scale(float factor, float *values, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) values[i] *= factor;
}

extern "C" __global__ void fill(float value, float *values, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) values[i] = value;
}

#define SUM_THREADS 256

// Adds up a value of each of SUM_THREADS threads, always in the same order.
__device__ __forceinline__ double sum_of_block(double value) {
    __shared__ double shared[SUM_THREADS];
    shared[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = SUM_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

// Writes the sum of each chunk of `chunk` elements. One block of SUM_THREADS threads at a time adds up a
// chunk.
extern "C" __global__ void sum_chunks(
    const float *values, u64 count, u64 chunk, double *sums, u64 chunks) {
    for (u64 at = blockIdx.x; at < chunks; at += gridDim.x) {
        u64 start = at * chunk, end = min(start + chunk, count);
        double sum = 0.0;
        for (u64 i = start + threadIdx.x; i < end; i += SUM_THREADS) sum += values[i];
        sum = sum_of_block(sum);
        if (threadIdx.x == 0) sums[at] = sum;
        // The next chunk uses the same shared memory.
        __syncthreads();
    }
}

// Writes the sum of all elements to the first. One block of SUM_THREADS threads.
extern "C" __global__ void sum_sums(double *sums, u64 count) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < count; i += SUM_THREADS) sum += sums[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) sums[0] = sum;
}
