// Losses and their derivatives. Each writes the loss of every sample; a sum follows.

// Threads of the block that computes a row of logits.
#define ROW_THREADS 128

// Replaces each row of logits by the derivatives of its cross entropy times `scale`, and writes its
// loss. One block of ROW_THREADS threads at a time works on a row. Labels are below `classes`.
extern "C" __global__ void softmax_cross_entropy(
    float *logits, const u32 *labels, float *losses, u64 rows, u64 classes, float scale) {
    __shared__ float shared[ROW_THREADS];
    u32 thread = threadIdx.x;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float *values = logits + row * classes;
        float label_logit = values[labels[row]];
        // The greatest exponent becomes 0: no exponential overflows, and their sum is at least 1.
        float greatest = __uint_as_float(0xff800000);
        for (u64 i = thread; i < classes; i += ROW_THREADS) greatest = fmaxf(greatest, values[i]);
        shared[thread] = greatest;
        __syncthreads();
        for (u32 half = ROW_THREADS / 2; half > 0; half /= 2) {
            if (thread < half) shared[thread] = fmaxf(shared[thread], shared[thread + half]);
            __syncthreads();
        }
        greatest = shared[0];
        __syncthreads();
        float sum = 0.0f;
        for (u64 i = thread; i < classes; i += ROW_THREADS) {
            float exponential = expf(values[i] - greatest);
            values[i] = exponential;
            sum += exponential;
        }
        shared[thread] = sum;
        __syncthreads();
        for (u32 half = ROW_THREADS / 2; half > 0; half /= 2) {
            if (thread < half) shared[thread] += shared[thread + half];
            __syncthreads();
        }
        sum = shared[0];
        float factor = scale / sum;
        for (u64 i = thread; i < classes; i += ROW_THREADS) {
            float derivative = values[i] * factor;
            values[i] = i == labels[row] ? derivative - scale : derivative;
        }
        if (thread == 0) losses[row] = logf(sum) - (label_logit - greatest);
        // The next row uses the same shared memory.
        __syncthreads();
    }
}

// Replaces each logit by the derivative of its cross entropy with a probability, times `scale`.
extern "C" __global__ void sigmoid_cross_entropy(
    float *logits, const float *targets, float *losses, u64 count, float scale) {
    for (u64 i = first_index(); i < count; i += all_threads()) {
        float x = logits[i], target = targets[i], small = expf(-fabsf(x));
        float probability = x < 0.0f ? small / (1.0f + small) : 1.0f / (1.0f + small);
        // log(1 + exp(x)) - target * x. A NaN stays one: the maximum with 0 would hide it.
        losses[i] = (x > 0.0f ? x : 0.0f) - x * target + log1pf(small);
        logits[i] = scale * (probability - target);
    }
}

// Replaces each output by the derivative of its squared error, times `scale`.
extern "C" __global__ void mean_squared_error(
    float *outputs, const float *targets, float *losses, u64 count, float scale) {
    for (u64 i = first_index(); i < count; i += all_threads()) {
        float error = outputs[i] - targets[i];
        losses[i] = error * error;
        outputs[i] = scale * (2.0f * error);
    }
}
