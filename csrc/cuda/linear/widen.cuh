// A packed matrix in E4M3 as bfloat16, its columns in their own order.
#pragma once

#include "cuda/common/fp8.cuh"
#include "cuda/common/launch.h"
#include "cuda/linear/fp8_stage.h"
#include "cuda/linear/linear.h"

namespace tide::cuda {

constexpr int kWidenThreads = 256;

// A thread widens 16 columns: the four numbers that lie together are columns 2t, 2t + 1, 2t + 8, 2t + 9.
//
// The linear that follows reads its weights early, so that it must not start early: this kernel never allows it.
template <bool kDealt>
__global__ void __launch_bounds__(kWidenThreads) widen_weight(const __grid_constant__ Fp8LinearParams p) {
    using Factor = Fp8Factor<kDealt>;
    wait_for_previous();
    const uint32_t vectors = static_cast<uint32_t>(p.in_features) / kFp8Vector;  // of a row
    const uint32_t at = blockIdx.x * kWidenThreads + threadIdx.x, row = at / vectors;
    if (row >= p.out_features) return;
    const int column = static_cast<int>((at - row * vectors) * kFp8Vector);
    const auto factor = Factor::of(p.scales[row / p.block_rows * p.scale_stride + (column >> p.scale_shift)]);
    const uint4 raw = static_cast<const uint4*>(p.weight)[at];
    const uint2 a = Factor::widen(raw.x, factor), b = Factor::widen(raw.y, factor);
    const uint2 c = Factor::widen(raw.z, factor), d = Factor::widen(raw.w, factor);
    uint4* y = static_cast<uint4*>(p.y) + int64_t{at} * 2;
    y[0] = {a.x, b.x, c.x, d.x};
    y[1] = {a.y, b.y, c.y, d.y};
}

inline void launch_widen_fp8(const Fp8LinearParams& params, bool dealt, cudaStream_t stream) {
    const int64_t vectors = params.out_features * (params.in_features / kFp8Vector);
    if (vectors >= INT32_MAX) throw std::runtime_error("widen_fp8: too many numbers for one launch");
    const int64_t grid = (vectors + kWidenThreads - 1) / kWidenThreads;
    launch("widen_fp8", dealt ? widen_weight<true> : widen_weight<false>, {grid, kWidenThreads, 0, 1, Effect::kWeights},
           stream, params);
}

}  // namespace tide::cuda
