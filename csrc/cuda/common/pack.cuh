// Eight neighbouring elements of a row as floats. Which thread holds which elements never depends on how a row lies in
// memory, only how they are fetched does, so results do not depend on it either.
#pragma once

#include <cstdint>

#include "cuda/common/convert.cuh"

namespace tide::cuda {

constexpr int kPack = 8;

struct Pack {
    float at[kPack];
};

inline bool is_aligned(const void* data, int64_t stride, int64_t element_bytes) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element_bytes % 16 == 0;
}

// The packs of a row of `width` elements.
inline int64_t packs_of(int64_t width) {
    return (width + kPack - 1) / kPack;
}

// `count` elements from `from`, at most 8, the rest `missing`. `aligned`: 16 bytes may be read at a time.
template <typename T>
__device__ inline Pack load_pack(const T* from, int64_t count, bool aligned, float missing = 0.0f) {
    Pack pack;
    if (aligned && count >= kPack) {
        alignas(16) T raw[kPack];
#pragma unroll
        for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
            reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(from)[i];
        }
#pragma unroll
        for (int i = 0; i < kPack; ++i) pack.at[i] = to_float(raw[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) pack.at[i] = i < count ? to_float(from[i]) : missing;
    }
    return pack;
}

template <typename T>
__device__ inline void store_pack(T* to, const Pack& pack, int64_t count, bool aligned) {
    if (aligned && count >= kPack) {
        alignas(16) T raw[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) raw[i] = from_float<T>(pack.at[i]);
#pragma unroll
        for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(raw)[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (i < count) to[i] = from_float<T>(pack.at[i]);
        }
    }
}

}  // namespace tide::cuda
