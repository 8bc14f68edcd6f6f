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

// The half types, by their bits: the same on every generation of devices, and the same as on the
// processor.

__device__ __forceinline__ u16 f16_of(float value) {
    u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    // NaN keeps its first bits, and is quiet.
    if (size > 0x7f800000) return sign | 0x7e00 | (size >> 13 & 0x3ff);
    // From 65,520 on the nearest is infinite.
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size >= 0x38800000) {
        u32 rebased = size - 0x38000000;
        return sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
    }
    // Up to half of the smallest number the nearest is 0.
    if (size <= 0x33000000) return sign;
    u32 shift = 126 - (size >> 23), mantissa = (size & 0x7fffff) | 0x800000;
    u32 rounded = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return sign | (rounded + (rest > half || (rest == half && (rounded & 1))));
}

__device__ __forceinline__ float f32_of_f16(u16 half) {
    u32 sign = (u32)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    if (exponent == 0x1f)
        return __uint_as_float(sign | 0x7f800000 | (mantissa ? 0x400000 | mantissa << 13 : 0));
    // 2^-24 is the unit of numbers without an exponent.
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)mantissa * 5.9604644775390625e-8f));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

__device__ __forceinline__ u16 bf16_of(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ float f32_of_bf16(u16 half) {
    u32 quiet = (half & 0x7fff) > 0x7f80 ? 0x40 : 0;
    return __uint_as_float((u32)(half | quiet) << 16);
}
