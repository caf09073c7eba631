// The factor of a row in Hugging Face's LlamaRMSNorm, by one CTA. Thread i takes the packs i, i + threads, ...; the
// number of threads follows from the width alone, so that a row's sum has one order.
#pragma once

#include "cuda/common/block.cuh"
#include "cuda/common/pack.cuh"

namespace tide::cuda {

constexpr int kMaxNormThreads = 1024;

inline int norm_threads(int64_t width) {
    const int64_t warps = (packs_of(width) + kWarp - 1) / kWarp, most = kMaxNormThreads / kWarp;
    return static_cast<int>(warps < most ? warps : most) * kWarp;
}

// A thread's pack of numbers more, squared.
__device__ inline float add_squares(float squares, const Pack& pack) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares = fmaf(pack.at[i], pack.at[i], squares);
    return squares;
}

// Of the squares that each thread has added up. `shared` holds one float per warp and is free again when the next
// barrier has been passed.
__device__ inline float norm_factor(float squares, int64_t width, float eps, float* shared) {
    return rsqrtf(block_sum(squares, shared) / static_cast<float>(width) + eps);
}

template <typename T>
__device__ float row_norm_factor(const T* row, int64_t width, bool aligned, float eps, float* shared) {
    float squares = 0.0f;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack)
        squares = add_squares(squares, load_pack(row + at, width - at, aligned));
    return norm_factor(squares, width, eps, shared);
}

}  // namespace tide::cuda
