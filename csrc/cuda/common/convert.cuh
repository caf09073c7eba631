// Storage types on the device and their way to float32 and back (round to nearest even).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "dtype.h"

namespace tide::cuda {

__device__ inline float to_float(float v) {
    return v;
}
__device__ inline float to_float(__half v) {
    return __half2float(v);
}
__device__ inline float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}

template <typename T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
    return v;
}
template <>
__device__ inline __half from_float<__half>(float v) {
    return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

// What is left of `v` when it is stored as T.
template <typename T>
__device__ inline float round_to(float v) {
    return to_float(from_float<T>(v));
}

// Two numbers as they lie in memory, the first in the low half.
__device__ inline uint32_t pack(float first, float second, __half) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint32_t pack(float first, float second, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
struct Storage {
    using Type = T;
};

// Calls `run(Storage<T>{})` with the type that `dtype` names.
template <typename Run>
void with_storage(const char* op, DType dtype, Run&& run) {
    switch (dtype) {
        case DType::kFloat32:
            return run(Storage<float>{});
        case DType::kFloat16:
            return run(Storage<__half>{});
        case DType::kBFloat16:
            return run(Storage<__nv_bfloat16>{});
    }
    throw std::runtime_error(std::string(op) + ": unknown dtype");
}

}  // namespace tide::cuda
