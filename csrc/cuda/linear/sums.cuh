// What the kernels of the fast linear share: how in_features is cut into slices, and how the slices' sums are added.
//
// Each output is the sum of its slices in order, and a slice the sum of its products, 16 neighbouring columns at a
// time, in order: whatever the kernel, the tile, the other rows or their number, the bits are the same. 16 neighbours,
// because the products of four warps (warpgroup.cuh) take no others; ldmatrix sends them to those of one.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/ptx/cluster.cuh"
#include "cuda/common/ptx/tensor_core.cuh"
#include "cuda/linear/kernels.h"
#include "cuda/linear/norm.cuh"
#include "cuda/linear/output.cuh"

namespace tide::cuda {

constexpr int kBlockColumns = 64;                        // slice s is made of the blocks s, s + kSlices, ...
constexpr int kStrideColumns = kSlices * kBlockColumns;  // from a block of a slice to its next
constexpr int kTileRows = 16;
constexpr int kTileTokens = 8;

// A CTA of a cluster of kCluster: a warp for each of its slices.
template <int kRowTiles_, int kTokenTiles_, int kCluster_, bool kNormed_>
struct LinearShape {
    static constexpr int kRowTiles = kRowTiles_, kTokenTiles = kTokenTiles_, kCluster = kCluster_;
    static constexpr bool kNormed = kNormed_;
    static constexpr int kWarps = kSlices / kCluster;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kTokens = kTokenTiles * kTileTokens;
    static constexpr int kSquares = kRowTiles * kTileRows;      // index of a token's sum of squares, after its sums
    static constexpr int kSumStride = kSquares + 4;             // floats; the 4 keep quads in different banks
    static constexpr int kSumBytes = kTokens * kSumStride * 4;  // of one warp
};

// Of all slices, the last of them perhaps not whole.
__host__ __device__ inline int count_blocks(int64_t in_features) {
    return static_cast<int>((in_features + kBlockColumns - 1) / kBlockColumns);
}

// Blocks of the slice that begin before column `end`, for a slice that begins at `begin`.
__host__ __device__ inline int blocks_before(int64_t end, int64_t begin) {
    return end > begin ? static_cast<int>((end - begin + kStrideColumns - 1) / kStrideColumns) : 0;
}

#if TIDE_HAS_TENSOR_CORE_PATH

// The outputs of a CTA, token by token.
template <typename Shape>
struct Outputs {
    static constexpr int kColumns = Shape::kRowTiles * kTileRows;  // half of them when gated
    static constexpr int kAtOnce = Shape::kCluster * Shape::kThreads;
    int columns, count;
    int64_t first_token, first_column;
    bool gated;

    __device__ Outputs(const LinearParams& p, int64_t row_block, int64_t first_token)
        : columns(p.gated ? kColumns / 2 : kColumns),
          first_token(first_token),
          first_column(row_block * columns),
          gated(p.gated) {
        count = static_cast<int>(min(p.rows - first_token, static_cast<int64_t>(Shape::kTokens))) * columns;
    }
    // Divisions by constants are quick.
    __device__ int token(int i) const { return gated ? i / (kColumns / 2) : i / kColumns; }
    __device__ int column(int i) const { return i - token(i) * columns; }
    __device__ bool exists(const LinearParams& p, int i) const {
        return i < count && first_column + column(i) < p.out_features;
    }
    template <typename T>
    __device__ T residual(const LinearParams& p, int i) const {
        return exists(p, i) ? residual_of<T>(p, first_token + token(i), first_column + column(i)) : T{};
    }
};

// Adds the slices in order and writes the outputs. Each warp leaves its sums where its stages were, `warp_bytes` apart.
// `residual` is that of the thread's first output, which was asked for before there were any sums.
template <typename T, typename Shape>
__device__ inline void finish_outputs(const LinearParams& p, char* shared, int warp_bytes,
                                      const float (&sums)[Shape::kRowTiles][Shape::kTokenTiles][4],
                                      const RowSquares<Shape::kTokenTiles>& squares, int rank,
                                      const Outputs<Shape>& outputs, T residual) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const float share = 1.0f / static_cast<float>(p.in_features);
    float* partial = reinterpret_cast<float*>(shared + warp * warp_bytes);
#pragma unroll
    for (int m = 0; m < Shape::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Shape::kTokenTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partial[(n * kTileTokens + t * 2 + i % 2) * Shape::kSumStride + m * kTileRows + g + i / 2 * 8] =
                    sums[m][n][i];
        }
    }
    if constexpr (Shape::kNormed) {
#pragma unroll
        for (int n = 0; n < Shape::kTokenTiles; ++n) {
            if (squares.has(n))
                partial[(n * kTileTokens + g) * Shape::kSumStride + Shape::kSquares] = squares.sums[n / 4];
        }
    }
    if constexpr (Shape::kCluster > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    const auto add_slices = [&](int token, int row) {
        const int at = (token * Shape::kSumStride + row) * 4;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
            const int from = at + s % Shape::kWarps * warp_bytes;
            if constexpr (Shape::kCluster > 1) {
                sum += load_cluster(shared_address(shared) + from, s / Shape::kWarps);
            } else {
                sum += *reinterpret_cast<const float*>(shared + from);
            }
        }
        return sum;
    };
    for (int i = rank * Shape::kThreads + threadIdx.x; i < outputs.count; i += Outputs<Shape>::kAtOnce) {
        const int token = outputs.token(i), column = outputs.column(i);
        const int row = p.gated ? column / 8 * kTileRows + column % 8 : column;
        if (!outputs.exists(p, i)) continue;
        float up = p.gated ? add_slices(token, row + kTileRows / 2) : 0.0f;
        float sum = add_slices(token, row);
        if constexpr (Shape::kNormed) {
            const float factor = norm_factor(p, add_slices(token, Shape::kSquares), share);
            sum = __fmul_rn(sum, factor);  // in no tile joined with an addition
            up = __fmul_rn(up, factor);
        }
        const T added = i < Outputs<Shape>::kAtOnce ? residual : outputs.template residual<T>(p, i);
        write_output<T>(p, outputs.first_token + token, outputs.first_column + column, sum, up, added);
    }
    if constexpr (Shape::kCluster > 1) cluster_barrier();  // the other CTA may still be reading here
}

#endif

}  // namespace tide::cuda
