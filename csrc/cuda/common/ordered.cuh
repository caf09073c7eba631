// Numbers as integers in the same order, which a warp compares in one instruction.
#pragma once

#include <cstdint>

#include "cuda/common/block.cuh"

namespace tide::cuda {

constexpr uint32_t kNowhere = 0xffffffffu;
constexpr uint32_t kSign = 0x80000000u, kMissing = 0;  // below every number

// Greater numbers have greater keys, equal ones the same; NaN stands above every number, so that it is seen.
__device__ inline uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
    return isnan(value) ? kNowhere : bits & kSign ? ~bits : bits | kSign;
}

__device__ inline uint32_t warp_max(uint32_t value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kAllLanes, value);
#else
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
        value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
    return value;
#endif
}

}  // namespace tide::cuda
