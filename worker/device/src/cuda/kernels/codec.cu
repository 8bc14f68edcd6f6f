// Encoders of gradients with error feedback: the bytes and residuals of `pushpull_common::codec`, bit
// for bit.
//
// An encoder adds the gradient to the residual, encodes the sum, and writes the difference between the
// sum and its decoded form as the new residual. Each addition, multiplication and division rounds by
// itself, as on the processor: the intrinsics keep the compiler from fusing two of them.

// Threads of a block, and elements that share a scale or two means.
#define BLOCK 256
#define WARPS (BLOCK / 32)
#define ALL_LANES 0xffffffff

#define F32_MAX __uint_as_float(0x7f7fffff)

__device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7fffffff) < 0x7f800000;
}

// Returns the number to encode. A sum beyond the largest finite number becomes that number; an element
// that is not finite stays as it is.
__device__ __forceinline__ float with_residual(float gradient, float residual) {
    if (!is_finite(gradient)) return gradient;
    float sum = __fadd_rn(residual, gradient);
    if (sum > F32_MAX) return F32_MAX;
    return sum < -F32_MAX ? -F32_MAX : sum;
}

// Returns the new residual. NaN and infinities leave none.
__device__ __forceinline__ float residual_of(float sum, float decoded) {
    float rest = __fsub_rn(sum, decoded);
    return is_finite(rest) ? rest : 0.0f;
}

// Lowers `index`, which starts above all indices, to that of the first element that is NaN or infinite.
extern "C" __global__ void first_non_finite(const float *values, u64 *index, u64 count) {
    for (u64 i = first_index(); i < count; i += all_threads()) {
        if (!is_finite(values[i])) {
            atomicMin(index, i);
            break;
        }
    }
}

// f16 and bf16. `padded` is `count` rounded up to 4 elements, which have 8 bytes.

extern "C" __global__ void encode_f16(
    const float *gradient, float *residual, u16 *out, u64 count, u64 padded) {
    const float largest = 65504.0f;
    for (u64 i = first_index(); i < padded; i += all_threads()) {
        if (i >= count) {
            out[i] = 0;
            continue;
        }
        float sum = with_residual(gradient[i], residual[i]), bounded = sum;
        if (is_finite(sum) && sum > largest) bounded = largest;
        if (is_finite(sum) && sum < -largest) bounded = -largest;
        u16 half = f16_of(bounded);
        out[i] = half;
        residual[i] = residual_of(sum, f32_of_f16(half));
    }
}

extern "C" __global__ void encode_bf16(
    const float *gradient, float *residual, u16 *out, u64 count, u64 padded) {
    const u32 largest = 0x7f7f0000;
    for (u64 i = first_index(); i < padded; i += all_threads()) {
        if (i >= count) {
            out[i] = 0;
            continue;
        }
        float sum = with_residual(gradient[i], residual[i]);
        u32 bits = __float_as_uint(sum), sign = bits & 0x80000000, size = bits & 0x7fffffff;
        if (size > largest && size < 0x7f800000) size = largest;
        u16 half = bf16_of(__uint_as_float(sign | size));
        out[i] = half;
        residual[i] = residual_of(sum, f32_of_bf16(half));
    }
}

// Returns the largest number of all threads of a block to each of them.
__device__ __forceinline__ u32 largest_of_block(u32 value) {
    __shared__ u32 shared[WARPS];
    for (u32 step = 16; step > 0; step /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    for (u32 warp = 0; warp < WARPS; warp++) value = max(value, shared[warp]);
    // The next call uses the same shared memory.
    __syncthreads();
    return value;
}

// int8: BLOCK threads for each block of elements, with 4 bytes for its scale and one for each
// element.
extern "C" __global__ void encode_int8(
    const float *gradient, float *residual, u8 *out, u64 count, u64 blocks) {
    u32 thread = threadIdx.x;
    for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        u64 i = block * BLOCK + thread;
        float sum = i < count ? with_residual(gradient[i], residual[i]) : 0.0f;
        // The bits of magnitudes are in the order of the magnitudes.
        u32 largest = largest_of_block(__float_as_uint(sum) & 0x7fffffff);
        float scale = __fdiv_rn(__uint_as_float(largest), 127.0f);
        if (scale < __uint_as_float(0x00800000))
            scale = 0.0f;
        else if (!is_finite(__fmul_rn(scale, 127.0f)))
            // A scale that was rounded up would decode the largest number as infinity.
            scale = __uint_as_float(__float_as_uint(scale) - 1);
        u8 *bytes = out + block * (BLOCK + 4);
        if (thread == 0) *(float *)bytes = scale;
        if (i < count) {
            // The unit in the last place of 1.5 * 2^23 is 1, so the addition rounds and leaves the
            // integer in the lowest bits.
            signed char code = 0;
            if (scale > 0.0f)
                code = (signed char)__float_as_uint(__fadd_rn(__fdiv_rn(sum, scale), 12582912.0f));
            bytes[4 + thread] = (u8)code;
            residual[i] = residual_of(sum, __fmul_rn((float)code, scale));
        }
        u64 end = blocks * 4 + count, padded = (end + 7) / 8 * 8;
        if (block == blocks - 1 && end + thread < padded) out[end + thread] = 0;
    }
}

// Lanes of the sums of onebit, as on the processor: their order decides the rounding.
#define LANES 8

// onebit: BLOCK threads for each block of elements, with 8 bytes for two means and 8 for each 64
// elements.
extern "C" __global__ void encode_one_bit(
    const float *gradient, float *residual, u32 *out, u64 count, u64 blocks) {
    __shared__ float sums[BLOCK];
    __shared__ double lanes[2 * LANES];
    __shared__ u32 masks[WARPS];
    __shared__ float means[2];
    u32 thread = threadIdx.x, warp = thread / 32;
    for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        u64 i = block * BLOCK + thread;
        u32 length = (u32)min((u64)BLOCK, count - block * BLOCK);
        float sum = thread < length ? with_residual(gradient[i], residual[i]) : 0.0f;
        bool is_above = thread < length && sum >= 0.0f;
        u32 mask = __ballot_sync(ALL_LANES, is_above);
        sums[thread] = sum;
        if (thread % 32 == 0) masks[warp] = mask;
        __syncthreads();
        // The first LANES threads add up the elements that are not negative, the next LANES the
        // negative ones. The zeros behind the last element change no sum.
        if (thread < 2 * LANES) {
            double lane = 0.0;
            for (u32 at = thread % LANES; at < BLOCK; at += LANES) {
                double share = __dmul_rn((double)sums[at], 1.0 / BLOCK);
                lane = __dadd_rn(lane, (share >= 0.0) == (thread < LANES) ? share : 0.0);
            }
            lanes[thread] = lane;
        }
        __syncthreads();
        u32 *words = out + block * (2 + WARPS);
        if (thread < 2) {
            u32 above = 0;
            for (u32 other = 0; other < WARPS; other++) above += __popc(masks[other]);
            u32 number = max(thread == 0 ? above : length - above, 1);
            double total = 0.0;
            for (u32 lane = 0; lane < LANES; lane++)
                total = __dadd_rn(total, lanes[thread * LANES + lane]);
            double factor = __ddiv_rn((double)BLOCK, (double)number);
            float mean = __double2float_rn(__dmul_rn(total, factor));
            if (mean > F32_MAX) mean = F32_MAX;
            if (mean < -F32_MAX) mean = -F32_MAX;
            means[thread] = mean;
            words[thread] = __float_as_uint(mean);
        }
        // A word has the bits of two warps, of which the second may be beyond the last element.
        if (thread % 32 == 0 && warp < (length + 63) / 64 * 2) words[2 + warp] = mask;
        __syncthreads();
        if (thread < length) residual[i] = residual_of(sum, means[is_above ? 0 : 1]);
        // The next block uses the same shared memory.
        __syncthreads();
    }
}

// topk: a radix selection of the smallest magnitude that is sent, by digits of 8 bits from the highest,
// then a stream compaction in the order of the elements.

// Values of a digit. Each thread of a block has one.
#define DIGITS BLOCK
// Digits of a magnitude.
#define PASSES 4
// Elements of which a block counts those that are sent.
#define CHUNK 2048

// Returns the magnitude as an integer in the same order, above a zero bit.
__device__ __forceinline__ u32 key_of(float value) {
    return __float_as_uint(value) << 1;
}

// Returns the sum of the values of the threads before this one, and writes the sum of all to `total`.
__device__ __forceinline__ u32 sum_before(u32 value, u32 *total) {
    __shared__ u32 warps[WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    u32 before = 0, all = 0;
    for (u32 other = 0; other < WARPS; other++) {
        if (other < warp) before += warps[other];
        all += warps[other];
    }
    // The next call uses the same shared memory.
    __syncthreads();
    *total = all;
    return before + sum - value;
}

// The smallest key that is sent, and the number of elements with that key that are sent.
struct Cut {
    u32 key, ties;
};

// Finds the first `passes` digits of the `wanted`-th largest key, from the histograms of these digits.
// Every block repeats this, which saves a launch of one block after each pass.
__device__ __forceinline__ Cut find_cut(const u32 *histograms, u32 passes, u32 wanted) {
    __shared__ u32 found[2];
    Cut cut = {0, wanted};
    for (u32 pass = 0; pass < passes; pass++) {
        // The first thread has the highest digit.
        u32 digit = DIGITS - 1 - threadIdx.x, here = histograms[pass * DIGITS + digit], total;
        u32 before = sum_before(here, &total);
        // True for one thread: there are at least as many elements as are wanted.
        if (before < cut.ties && cut.ties - before <= here) {
            found[0] = digit;
            found[1] = cut.ties - before;
        }
        __syncthreads();
        cut.key |= found[0] << (24 - 8 * pass);
        cut.ties = found[1];
    }
    return cut;
}

// Counts the values of the digit of a pass, over the elements whose earlier digits are those of the
// cut. The first pass also adds the gradient to the residual.
extern "C" __global__ void top_k_histogram(
    const float *gradient, float *residual, u64 count, u32 wanted, u32 pass, u32 *histograms) {
    __shared__ u32 counts[DIGITS];
    counts[threadIdx.x] = 0;
    u32 cut = find_cut(histograms, pass, wanted).key, shift = 24 - 8 * pass;
    __syncthreads();
    for (u64 i = first_index(); i < count; i += all_threads()) {
        float sum = residual[i];
        if (pass == 0) {
            sum = with_residual(gradient[i], sum);
            residual[i] = sum;
        }
        u32 key = key_of(sum);
        if (pass == 0 || (key ^ cut) >> (shift + 8) == 0) atomicAdd(&counts[key >> shift & 255], 1);
    }
    __syncthreads();
    u32 mine = counts[threadIdx.x];
    if (mine > 0) atomicAdd(&histograms[pass * DIGITS + threadIdx.x], mine);
}

// Returns 1 for an element above the cut, 1 << 16 for one at the cut, and 0 for the others. The sum
// over a chunk has both counts.
__device__ __forceinline__ u32 rank_of(float value, Cut cut) {
    u32 key = key_of(value);
    return key > cut.key ? 1 : key == cut.key ? 1 << 16 : 0;
}

// Counts the elements of each chunk above the cut. The counts of those at the cut follow, for all
// chunks.
extern "C" __global__ void top_k_count(
    const float *residual, u64 count, u32 wanted, const u32 *histograms, u32 *counts, u64 chunks) {
    Cut cut = find_cut(histograms, PASSES, wanted);
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        u32 mine = 0, total;
        for (u32 at = threadIdx.x; at < CHUNK; at += BLOCK) {
            u64 i = chunk * CHUNK + at;
            if (i < count) mine += rank_of(residual[i], cut);
        }
        sum_before(mine, &total);
        if (threadIdx.x == 0) {
            counts[chunk] = total & 0xffff;
            counts[chunks + chunk] = total >> 16;
        }
    }
}

// Replaces the counts of each chunk by those of all chunks before it. One block of BLOCK threads.
extern "C" __global__ void top_k_scan(u32 *counts, u64 chunks) {
    for (u32 kind = 0; kind < 2; kind++, counts += chunks) {
        u32 carry = 0;
        for (u64 start = 0; start < chunks; start += BLOCK) {
            u64 chunk = start + threadIdx.x;
            u32 here = chunk < chunks ? counts[chunk] : 0, total;
            u32 before = sum_before(here, &total);
            if (chunk < chunks) counts[chunk] = carry + before;
            carry += total;
        }
    }
}

// Writes the pairs: their number, a zero, the indices, and the values, both padded to 8 bytes. An
// element that is sent leaves no residual.
extern "C" __global__ void top_k_write(
    float *residual, u64 count, u32 wanted, const u32 *histograms, const u32 *counts, u64 chunks,
    u32 *out) {
    Cut cut = find_cut(histograms, PASSES, wanted);
    u32 pairs = wanted;
    if (cut.key == 0) {
        // Zeros are never sent, so only the larger elements are.
        pairs -= cut.ties;
        cut.ties = 0;
    }
    u64 padded = ((u64)pairs + 1) / 2 * 2;
    u32 *indices = out + 2, *values = indices + padded;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        out[0] = pairs;
        out[1] = 0;
        if (padded > pairs) {
            indices[pairs] = 0;
            values[pairs] = 0;
        }
    }
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        u32 larger = counts[chunk], ties = counts[chunks + chunk];
        for (u32 at = threadIdx.x; at < CHUNK; at += BLOCK) {
            u64 i = chunk * CHUNK + at;
            float value = i < count ? residual[i] : 0.0f;
            u32 rank = i < count ? rank_of(value, cut) : 0, total;
            u32 before = sum_before(rank, &total);
            u32 larger_before = larger + (before & 0xffff), ties_before = ties + (before >> 16);
            if (rank == 1 || (rank > 1 && ties_before < cut.ties)) {
                u32 place = larger_before + min(ties_before, cut.ties);
                indices[place] = (u32)i;
                values[place] = __float_as_uint(value);
                residual[i] = 0.0f;
            }
            larger += total & 0xffff;
            ties += total >> 16;
        }
    }
}
