// Embedding bags. Bag n has the ids from ends[n - 1], or 0, to ends[n].

__device__ __forceinline__ u64 start_of(const u64 *ends, u64 bag) {
    return bag == 0 ? 0 : ends[bag - 1];
}

__device__ __forceinline__ float factor_of(u32 mean, u64 ids) {
    return mean ? 1.0f / (float)ids : 1.0f;
}

// Writes the combined rows of each bag. One thread at a time for each column of a bag.
extern "C" __global__ void embedding_bag(
    u32 mean, const float *table, u64 width, const u64 *ids, const u64 *ends, u64 bags,
    float *outputs) {
    for (u64 i = first_index(); i < bags * width; i += all_threads()) {
        u64 bag = i / width, column = i % width;
        u64 start = start_of(ends, bag), end = ends[bag];
        float factor = factor_of(mean, end - start), sum = 0.0f;
        for (u64 id = start; id < end; id++) sum += factor * table[ids[id] * width + column];
        outputs[i] = sum;
    }
}

// Writes the gradient of each id as a row of its own.
extern "C" __global__ void embedding_bag_rows(
    u32 mean, u64 width, const u64 *ends, u64 bags, const float *gradients, float *rows) {
    for (u64 i = first_index(); i < bags * width; i += all_threads()) {
        u64 bag = i / width, column = i % width;
        u64 start = start_of(ends, bag), end = ends[bag];
        float gradient = factor_of(mean, end - start) * gradients[i];
        for (u64 id = start; id < end; id++) rows[id * width + column] = gradient;
    }
}

// Adds the gradients of each distinct id to its row of the table. Id n has the entries from starts[n]
// to starts[n + 1]: the bag and the factor of each of its places, in their order. One thread at a time
// adds to an element, so the sums do not depend on the order of the threads.
extern "C" __global__ void embedding_bag_add(
    float *table, u64 width, const u64 *ids, const u64 *starts, u64 distinct, const u64 *bags,
    const float *factors, const float *gradients) {
    for (u64 i = first_index(); i < distinct * width; i += all_threads()) {
        u64 id = i / width, column = i % width;
        float *element = table + ids[id] * width + column;
        float sum = *element;
        for (u64 entry = starts[id]; entry < starts[id + 1]; entry++)
            sum += factors[entry] * gradients[bags[entry] * width + column];
        *element = sum;
    }
}
