// Activations with their biases, forwards and backwards.

// The codes of the activations.
#define IDENTITY 0
#define RELU 1
#define TANH 2
#define SIGMOID 3
#define GELU 4

// The exponent is never above 0, so nothing overflows.
__device__ __forceinline__ float sigmoid_of(float x) {
    float small = expf(-fabsf(x));
    return x < 0.0f ? small / (1.0f + small) : 1.0f / (1.0f + small);
}

// The cumulative normal distribution.
__device__ __forceinline__ float normal_of(float x) {
    return 0.5f * erfcf(-x * 0.707106781f);
}

// Adds the bias to each row, and writes the activations.
extern "C" __global__ void activate(
    u32 activation, const float *bias, float *sums, float *outputs, u64 count, u64 columns) {
    for (u64 i = first_index(); i < count; i += all_threads()) {
        float x = sums[i] + bias[i % columns];
        float y = x;
        // NaN is not below 0.
        if (activation == RELU) y = x < 0.0f ? 0.0f : x;
        if (activation == TANH) y = tanhf(x);
        if (activation == SIGMOID) y = sigmoid_of(x);
        if (activation == GELU) y = x * normal_of(x);
        sums[i] = x;
        outputs[i] = y;
    }
}

// Replaces the gradients by the outputs with those by the sums.
extern "C" __global__ void activate_back(
    u32 activation, const float *sums, const float *outputs, float *gradients, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) {
        float x = sums[i], y = outputs[i], slope = 1.0f;
        // NaN is not at most 0.
        if (activation == RELU) slope = x <= 0.0f ? 0.0f : 1.0f;
        if (activation == TANH) slope = 1.0f - y * y;
        if (activation == SIGMOID) slope = y * (1.0f - y);
        if (activation == GELU) slope = normal_of(x) + x * (expf(-0.5f * x * x) * 0.398942280f);
        // An infinite gradient of an inactive unit is none.
        gradients[i] = slope == 0.0f ? 0.0f : gradients[i] * slope;
    }
}

// Writes the sums of every `rows_at_once` rows, in the order of the rows: one row of `sums` for each.
extern "C" __global__ void sum_rows(
    const float *matrix, u64 rows, u64 columns, u64 rows_at_once, float *sums) {
    u64 chunks = (rows + rows_at_once - 1) / rows_at_once;
    for (u64 i = first_index(); i < chunks * columns; i += all_threads()) {
        u64 chunk = i / columns, column = i % columns;
        u64 end = min((chunk + 1) * rows_at_once, rows);
        float sum = 0.0f;
        for (u64 row = chunk * rows_at_once; row < end; row++) sum += matrix[row * columns + column];
        sums[i] = sum;
    }
}
