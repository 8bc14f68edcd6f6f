// Kernels that are right: the emulator must run them without a fault. `correct.ptx` is compiled
// from this file by NVRTC 12.0 for compute_70.

extern "C" {

__global__ void vector_add(float* out, const float* a, const float* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

__global__ void matrix_product(float* c, const float* a, const float* b, int m, int n, int k) {
    __shared__ float left[16][17], right[16][17];
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int at = 0; at < k; at += 16) {
        int x = at + threadIdx.x, y = at + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = row < m && x < k ? a[row * k + x] : 0;
        right[threadIdx.y][threadIdx.x] = y < k && column < n ? b[y * n + column] : 0;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

__global__ void reduce_dynamic(float* out, const float* in, int n) {
    extern __shared__ float part[];
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
    part[threadIdx.x] = sum;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(out, part[0]);
}

__global__ void reduce_warp(float* out, const float* in) {
    __shared__ float part[32];
    float sum = in[blockIdx.x * blockDim.x + threadIdx.x];
    for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}

__device__ __constant__ float weights[4] = {1, 2, 3, 4};
__device__ int counter = 5;

__device__ __noinline__ float polynomial(const float* c, int n, float x) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum = sum * x + c[i];
    return sum;
}

__global__ void call_and_tables(float* out, const float* in, int n, int seed) {
    float local[8];
    for (int i = 0; i < 8; i++) local[i] = (float)(i + seed);
    float x = in[threadIdx.x];
    out[threadIdx.x] = polynomial(local, 1 + (n + threadIdx.x) % 8, x) * weights[threadIdx.x & 3];
    if (threadIdx.x == 0) atomicAdd(&counter, 1);
}

__global__ void vectors(float4* out, const float4* __restrict__ in, const unsigned short* half, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = in[i];
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half[i]));
    out[i] = make_float4(v.w + f, v.z * f, v.y - f, v.x / f);
}

__global__ void functions(float* out, const float* x, const float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i], b = y[i];
    float* o = out + i * 12;
    o[0] = expf(a); o[1] = logf(fabsf(b)); o[2] = sinf(a); o[3] = cosf(b * 1e6f);
    o[4] = powf(fabsf(a), b); o[5] = erff(a); o[6] = tanhf(b); o[7] = sqrtf(fabsf(a));
    o[8] = a / b; o[9] = rsqrtf(fabsf(b)); o[10] = log1pf(fabsf(a)); o[11] = fmodf(a, b);
}

__global__ void doubles(double* out, const double* x, const double* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double a = x[i], b = y[i];
    double* o = out + i * 6;
    o[0] = exp(a); o[1] = log(fabs(b)); o[2] = pow(fabs(a), b); o[3] = sqrt(fabs(a)); o[4] = a / b; o[5] = sin(a);
}

__global__ void integers(long long* out, const int* a, const unsigned* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int x = a[i]; unsigned y = b[i];
    long long* o = out + i * 8;
    o[0] = x / 7 + x % 5; o[1] = y / 11u + y % 13u; o[2] = (long long)x * (int)y;
    o[3] = __popc(y) * 100 + __clz(y); o[4] = __umulhi(y, 0x9E3779B9u); o[5] = x / ((int)y | 1);
    o[6] = ((unsigned long long)y << 32 | (unsigned)x) % ((unsigned long long)y + 3); o[7] = __funnelshift_l(y, (unsigned)x, 7);
}

__global__ void atomics(int* words, unsigned* unsigned_words, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&words[0], i); atomicMax(&words[1], i); atomicMin(&words[2], -i); atomicExch(&words[3], 7);
    atomicCAS(&words[4], 0, 9); atomicOr(&unsigned_words[0], 1u << (i & 31)); atomicAnd(&unsigned_words[1], ~(1u << (i & 31)));
    atomicXor(&unsigned_words[2], 3u); atomicInc(&unsigned_words[3], 9u);
}

__global__ void votes(unsigned* out, const int* in) {
    int x = in[threadIdx.x];
    out[threadIdx.x * 5] = __ballot_sync(0xffffffffu, x > 3);
    out[threadIdx.x * 5 + 1] = __any_sync(0xffffffffu, x > 100);
    out[threadIdx.x * 5 + 2] = __syncthreads_count(x > 3);
    out[threadIdx.x * 5 + 3] = __shfl_up_sync(0xffffffffu, x, 1, 8);
    out[threadIdx.x * 5 + 4] = __match_any_sync(0xffffffffu, x & 1);
}

struct Options { int which; float scale[3]; double offset; };

__global__ void by_value(float* out, Options options) {
    out[threadIdx.x] = options.scale[options.which] * threadIdx.x + (float)options.offset;
}

__global__ void choose(int* out, int n) {
    switch (n) {
        case 0: out[0] = 10; break;
        case 1: out[0] = atomicAdd(out + 1, 3); break;
        case 2: out[0] = out[1] * 7; break;
        case 3: out[0] = -out[1]; break;
        case 4: out[0] = out[1] << 3; break;
        case 5: out[0] = out[1] / 3; break;
        case 6: out[0] = __popc(out[1]); break;
        default: out[0] = n;
    }
}

__global__ void spin(float* out, int n) {
    float x = threadIdx.x;
    for (int i = 0; i < n; i++) x = x * 1.0001f + 0.5f;
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

}
