// E4M3 weights on their way to the products of a warp: copies to a stage, and bfloat16 from there.
//
// Each stage also has the scales of its rows, 16 floats for each row tile: they arrive with the weights and cost no
// register until they are used. Scales of whole rows are copied the first time a stage is filled; they stay.
#pragma once

#include "cuda/common/fp8.cuh"
#include "cuda/linear/fp8_stage.h"
#include "cuda/linear/sums.cuh"

namespace tide::cuda {

constexpr int kScaleBytes = kTileRows * 4;  // of a row tile in a stage

#if TIDE_HAS_TENSOR_CORE_PATH

// Of rows g and g + 8 of a row tile.
template <bool kDealt>
struct RowFactors {
    typename Fp8Factor<kDealt>::Type upper, lower;

    // `scales`: where those of the row tile are in a stage.
    __device__ void read(uint32_t scales) {
        const uint32_t at = scales + threadIdx.x % 32 / 4 * 4;
        upper = Fp8Factor<kDealt>::of(load_shared_float(at));
        lower = Fp8Factor<kDealt>::of(load_shared_float(at + 8 * 4));
    }
};

// 32 columns of a row tile in bfloat16, two times 16 of them as multiply_tile() wants them. `at`: what this lane names.
template <bool kDealt>
__device__ inline void widen_tile(uint32_t at, const RowFactors<kDealt>& rows, uint4& first, uint4& second) {
    using Factor = Fp8Factor<kDealt>;
    const uint4 raw = load_matrices(at);
    const uint2 a = Factor::widen(raw.x, rows.upper), b = Factor::widen(raw.y, rows.lower);
    const uint2 c = Factor::widen(raw.z, rows.upper), d = Factor::widen(raw.w, rows.lower);
    first = {a.x, b.x, a.y, b.y};
    second = {c.x, d.x, c.y, d.y};
}

// The weight rows of one warp, as one lane copies them, kColumns of a slice a stage.
template <int kRowTiles, int kColumns>
struct Fp8Stream {
    using Stage = Fp8Stage<kColumns>;
    static constexpr int kLoads = kRowTiles * Stage::kCopies;
    static constexpr int kLoadBytes = 32 * kVectorBytes;
    static constexpr int kScales = (kRowTiles * kTileRows + 31) / 32;  // that a lane copies
    static_assert(kTileRows == Stage::kRows);
    const char* from;              // this lane's vector of its first row, at column 0 of the slice
    uint32_t scales[kScales];      // where those of this lane's rows are in the first column of blocks
    int64_t tile_step, copy_step;  // bytes to the next tile, and to the rows of a tile's second copy
    uint32_t to;                   // this lane's place in a stage
    uint32_t valid;                // bit load: that row exists

    __device__ Fp8Stream(const Fp8LinearParams& p, int64_t row_block, int64_t slice_begin, int lane) {
        const int64_t tile_columns = p.gated ? kTileRows / 2 : kTileRows;  // columns of y per row tile
        const int64_t first = row_block * kRowTiles * tile_columns;
        const auto column_of = [&](int tile, int row) {
            return first + tile * tile_columns + (p.gated ? row % 8 : row);
        };
        const int row = Stage::copied_row(lane), vector = Stage::copied_vector(lane);
        const bool of_up = p.gated && row >= 8;
        from = static_cast<const char*>(p.weight) + (column_of(0, row) + (of_up ? p.out_features : 0)) * p.in_features +
               slice_begin + vector * kFp8Vector;
        tile_step = tile_columns * p.in_features;
        copy_step = (p.gated ? p.out_features : 8) * p.in_features;
        to = Stage::offset(row, vector);
        valid = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const bool here = column_of(i / Stage::kCopies, row + i % Stage::kCopies * 8) < p.out_features;
            valid |= static_cast<uint32_t>(here) << i;
        }
#pragma unroll
        for (int i = 0; i < kScales; ++i) {  // rows that do not exist have the scale of one that does
            const int place = lane + i * 32, of_tile = place % kTileRows;
            const int64_t column = min(column_of(place / kTileRows, of_tile), p.out_features - 1);
            const int64_t weight_row = column + (p.gated && of_tile >= 8 ? p.out_features : 0);
            const uint32_t block = static_cast<uint32_t>(weight_row) / p.block_rows;
            scales[i] = block * static_cast<uint32_t>(p.scale_stride);
        }
    }

    // The stage that begins `column` columns after the slice. All its rows and columns exist.
    __device__ void copy(uint32_t stage, int64_t column) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) copy_async_128(stage + to + i * kLoadBytes, address(column, i));
    }
    // Zeros for what does not exist. Little code: this is for the edges.
    __device__ void copy_edge(uint32_t stage, int64_t column, bool in_columns, const void* safe) const {
#pragma unroll 1
        for (int i = 0; i < kLoads; ++i) {
            const bool here = in_columns && (valid >> i & 1);
            copy_async_or_zero(stage + to + i * kLoadBytes, here ? address(column, i) : safe, here);
        }
    }
    // The scales of all rows in the block of column `column` of the weight, to `to_scales`.
    __device__ void copy_scales(const Fp8LinearParams& p, uint32_t to_scales, int64_t column, int lane) const {
#pragma unroll
        for (int i = 0; i < kScales; ++i) {
            if (lane + i * 32 < kRowTiles * kTileRows)
                copy_async_float(to_scales + (lane + i * 32) * 4,
                                 p.scales + scales[i] + (static_cast<uint32_t>(column) >> p.scale_shift));
        }
    }

  private:
    __device__ const char* address(int64_t column, int load) const {
        return from + column + load / Stage::kCopies * tile_step + load % Stage::kCopies * copy_step;
    }
};

#endif

}  // namespace tide::cuda
