// What CTAs do together: sums in an order that depends on the number of threads alone, and who finishes last.
#pragma once

#include <cstdint>

#include "cuda/common/limits.h"

namespace tide::cuda {

// Of all lanes of a warp, or of each team of neighbours in it.
template <int kTeam = kWarp>
__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int distance = kTeam / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
}

// `shared` holds one float per warp and is free again when the next barrier has been passed.
__device__ inline float block_sum(float value, float* shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    return warp_sum(lane < blockDim.x / kWarp ? shared[lane] : 0.0f);
}

// Whether the calling thread is the last of `count` to come here; it then sees what the others, and those whom they
// have waited for, wrote before. The counter is 0 beforehand and afterwards.
__device__ inline bool count_last(uint32_t* counter, uint32_t count) {
    __threadfence();
    const bool last = atomicInc(counter, count - 1) == count - 1;
    __threadfence();
    return last;
}

// The same for the CTAs, of which every thread must call it.
__device__ inline bool last_to_finish(uint32_t* counter, uint32_t count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = count_last(counter, count);
    __syncthreads();
    return last;
}

// CTAs for so many tiles of work; kernels take those beyond in a loop.
inline int64_t grid_of(int64_t tiles) {
    constexpr int64_t kMost = 1 << 16;
    return tiles < kMost ? tiles : kMost;
}

}  // namespace tide::cuda
