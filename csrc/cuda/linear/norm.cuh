// What a linear that norms its input does to x on the way to the products.
//
// The norm is a factor of the whole row times a weight for each column. The column's weight is multiplied in before the
// products, rounded once; the row's factor is left for the finished sums, since its sum of squares is ready only then.
// The squares come from the tensor cores too: x times itself, of which the diagonal counts. They are added 32 columns
// at a time and then slice by slice, as the products are, so that they are the same in every tile.
#pragma once

#include "cuda/common/ptx/tensor_core.cuh"
#include "cuda/linear/linear.h"

namespace tide::cuda {

// From the sum of squares of a row of x; `share` is 1 / in_features.
__device__ inline float norm_factor(const LinearParams& p, float squares, float share) {
    return rsqrtf(fmaf(squares, share, p.norm_eps));
}

#if TIDE_HAS_TENSOR_CORE_PATH

__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
}

// The sums of squares of a warp's slice of kTiles token tiles. Thread (g, t) keeps row g of the tiles t, t + 4, ...: in
// one register for four tiles, since a register too many goes to memory and waits there for all copies before it.
template <int kTiles>
struct RowSquares {
    float sums[(kTiles + 3) / 4] = {};

    __device__ static bool has(int tile) { return static_cast<int>(threadIdx.x % 4) == tile % 4; }
    __device__ void add(int tile, const uint4& x) {
        const float more = squares_of(x);
        if (has(tile)) sums[tile / 4] += more;
    }
};

__device__ inline uint4 multiply_vector(const uint4& x, const uint4& weight) {
    return {multiply_pair(x.x, weight.x), multiply_pair(x.y, weight.y), multiply_pair(x.z, weight.z),
            multiply_pair(x.w, weight.w)};
}

// Copies 8 * kVectors of the norm's weights after the weights of a stage, lane i vector i. No kernel writes them, so
// they may be read before wait_for_previous().
template <int kVectors>
__device__ inline void copy_norm(const LinearParams& p, int64_t first_column, uint32_t to) {
    const uint32_t lane = threadIdx.x % 32, column = static_cast<uint32_t>(first_column) + lane * kVector;
    if (lane >= kVectors) return;
    const bool here = column < static_cast<uint32_t>(p.in_features);
    copy_async_or_zero(to + lane * kVectorBytes, static_cast<const char*>(p.norm) + (here ? column * 2 : 0), here);
}

#endif

}  // namespace tide::cuda
