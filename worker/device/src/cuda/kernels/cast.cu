// Casts between float and the half types.

extern "C" __global__ void round_f16(const float *values, u16 *halves, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) halves[i] = f16_of(values[i]);
}

extern "C" __global__ void widen_f16(const u16 *halves, float *values, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) values[i] = f32_of_f16(halves[i]);
}

extern "C" __global__ void round_bf16(const float *values, u16 *halves, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) halves[i] = bf16_of(values[i]);
}

extern "C" __global__ void widen_bf16(const u16 *halves, float *values, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) values[i] = f32_of_bf16(halves[i]);
}
