// Kernels with one planted bug each: the emulator must find it. `faulty.ptx` is compiled from this
// file by NVRTC 12.0 for compute_70.

extern "C" {

__global__ void off_by_one(float* out, const float* in, int n) {
    int i = threadIdx.x;
    if (i <= n) out[i] = in[i];
}

__global__ void shared_off_by_one(float* out, int n) {
    __shared__ float first[64], second[64];
    first[threadIdx.x] = 1; second[threadIdx.x] = 2;
    __syncthreads();
    out[threadIdx.x] = first[threadIdx.x + n] + second[threadIdx.x];
}

__global__ void missing_barrier(float* out, const float* in) {
    __shared__ float part[64];
    part[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = part[63 - threadIdx.x];
}

__global__ void missing_second_barrier(float* out, const float* in, int n) {
    __shared__ float part[64];
    float sum = 0;
    for (int at = 0; at < n; at += 64) {
        part[threadIdx.x] = in[at + threadIdx.x];
        __syncthreads();
        sum += part[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

__global__ void wrong_stride(float* out, const float* in, int width, int stride) {
    out[blockIdx.x * stride + threadIdx.x] = in[blockIdx.x * width + threadIdx.x];
}

__global__ void uninitialized_shared(float* out) {
    __shared__ float part[64];
    if (threadIdx.x < 63) part[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = part[threadIdx.x];
}

__global__ void uninitialized_local(float* out, int n) {
    float values[8];
    for (int i = 0; i < n; i++) values[i] = i;
    out[threadIdx.x] = values[threadIdx.x & 7];
}

__global__ void plain_sum(float* out, const float* in) { out[0] += in[threadIdx.x]; }

__global__ void divergent_barrier(float* out, const float* in, int n) {
    __shared__ float part[64];
    if (threadIdx.x >= n) return;
    part[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = part[n - 1 - threadIdx.x];
}

__global__ void two_barriers(float* out, int n) {
    if (threadIdx.x < n) { __syncthreads(); out[threadIdx.x] = 1; }
    else { __syncthreads(); out[threadIdx.x] = 2; __threadfence(); }
}

__global__ void divergent_shuffle(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
}

__global__ void endless(volatile int* flag) { while (flag[0] == 0) {} }

__global__ void misaligned(float* out, const char* in) { out[0] = *(const float*)(in + 1 + threadIdx.x); }

__global__ void divide(int* out, const int* in) { out[0] = in[0] / in[1]; }

__global__ void read(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }

}
