// The linear for up to 8 rows: tensor cores with the weight as the left operand, so that 8 rows of x fill a tile.
//
// A CTA owns some weight rows; its warps share out in_features in kSlices fixed slices and never wait for one another
// until the end. Slice s is made of the blocks s, s + kSlices, ... of 64 columns, so that the warps together read
// memory in long runs. A warp streams its slice of the weight through shared memory, a block a stage:
//
//     stage, per 16 weight rows:  row i = 8 vectors of 16 bytes, vector v at v ^ i % 8 (no bank conflicts)
//     then, with a norm:          8 vectors of its weight
//
// x goes to registers, one block early, and from there through shared memory too, which hands it out as the products
// want it. Where a slice is short (kShort: a stage for each of its blocks) all of x is asked for at once: a wait for
// memory instead of one for every block, which is most of the time of a small model's linear. Stages, each with its x,
// then lie as the blocks do in a row of the weight: with 9 blocks, of which one slice has two, they take little more
// than half of what two for every slice would, and more CTAs share a multiprocessor. See linear_sums.cuh for the order
// of the sums.
//
// Weights in E4M3 (fp8_weight.cuh) lie in rows of 64 bytes, half of the above, and have more stages.
//
// Weights are read before wait_for_previous(): no kernel writes them, but for widen_fp8(), which no launch overlaps.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/linear/staged.cuh"
#include "cuda/linear/sums.cuh"

namespace tide::cuda {

constexpr int kRowBytes = kBlockColumns * 2;
constexpr int kTileBytes = kTileRows * kRowBytes;  // of one stage of one row tile
constexpr int kLoadsPerTile = 4;                   // a warp's 32 vectors are 4 rows of a tile

template <int kRowTiles, bool kNormed, bool kFp8>
struct LinearLayout : LinearShape<kRowTiles, 1, 1, kNormed> {
    static constexpr int kShortStages = kRowTiles % 2 ? 4 : 3;
    static constexpr int kStages = !kFp8 ? kShortStages : kRowTiles % 2 ? 6 : 5;
    static constexpr int kNormOffset = kRowTiles * (kFp8 ? kTileBytes / 2 : kTileBytes);
    static constexpr int kScaleOffset = kNormOffset + (kNormed ? kRowBytes : 0);
    static constexpr int kStageBytes = kScaleOffset + (kFp8 ? kRowBytes : 0);  // x begins at a whole line
    static_assert(kRowTiles * kScaleBytes <= kRowBytes);
    static constexpr int kXBytes = kTileTokens * kRowBytes;  // 64 columns of 8 rows of x, after the stages
    static constexpr int kBlockBytes = kStageBytes + kXBytes;
    static_assert(kBlockBytes >= LinearLayout::kSumBytes);
};

#if TIDE_HAS_TENSOR_CORE_PATH

// The weight rows of one CTA, as one lane copies them.
template <int kRowTiles>
struct WeightStream {
    const char* from;                // this lane's vector of the first row tile at column 0 of the slice
    const char* safe;                // an address that can always be named
    int64_t tile_step, step1, half;  // bytes between row tiles, and between the four loads of a tile (see offset)
    uint32_t to;                     // this lane's place in a stage; for odd loads of a tile in the other half of a row
    uint32_t valid;                  // bit tile * 4 + load: that row exists
    int64_t columns;                 // left from this lane's vector at column 0 of the slice

    __device__ int64_t offset(int tile, int load) const {
        return tile * tile_step + (load & 1) * step1 + (load >> 1) * half;
    }

    // `block` counts blocks of the slice.
    __device__ void copy(int64_t block, uint32_t stage, bool all_valid) const {
        const char* source = from + block * (kSlices * kRowBytes);
        const uint32_t targets[2] = {stage + to, stage + (to ^ 4 * kVectorBytes)};
        if (all_valid) {
#pragma unroll
            for (int i = 0; i < kRowTiles * kLoadsPerTile; ++i)
                copy_async(targets[i % 2] + i * (kTileBytes / kLoadsPerTile),
                           source + offset(i / kLoadsPerTile, i % kLoadsPerTile));
        } else {
            const bool in_columns = block * kStrideColumns < columns;
#pragma unroll
            for (int i = 0; i < kRowTiles * kLoadsPerTile; ++i) {
                const bool here = in_columns && (valid >> i & 1);
                copy_async_or_zero(targets[i % 2] + i * (kTileBytes / kLoadsPerTile),
                                   here ? source + offset(i / kLoadsPerTile, i % kLoadsPerTile) : safe, here);
            }
        }
    }
};

template <int kRowTiles>
__device__ inline WeightStream<kRowTiles> weight_stream(const LinearParams& p, int64_t row_block, int64_t first_column,
                                                        int lane) {
    WeightStream<kRowTiles> s;
    const int row = lane / 8, vector = lane % 8;  // row of the first load; the others follow 4 rows apart
    const int64_t row_bytes = p.in_features * 2;
    const int64_t tile_columns = p.gated ? kTileRows / 2 : kTileRows;  // columns of y per row tile
    const int64_t column = row_block * kRowTiles * tile_columns + row;
    s.safe = static_cast<const char*>(p.weight);
    s.from = s.safe + column * row_bytes + (first_column + vector * kVector) * 2;
    s.tile_step = tile_columns * row_bytes;
    s.step1 = 4 * row_bytes;
    s.half = p.gated ? p.out_features * row_bytes : 8 * row_bytes;
    s.to = row * kRowBytes + (vector ^ row) * kVectorBytes;
    s.columns = p.in_features - first_column - vector * kVector;
    s.valid = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles * kLoadsPerTile; ++i) {
        const int load = i % kLoadsPerTile;
        const int64_t here = column + i / kLoadsPerTile * tile_columns + (load & 1) * 4 + (p.gated ? 0 : load / 2 * 8);
        s.valid |= static_cast<uint32_t>(here < p.out_features) << i;
    }
    return s;
}

template <int kRowTiles>
__device__ inline Fp8Stream<kRowTiles, kBlockColumns> weight_stream(const Fp8LinearParams& p, int64_t row_block,
                                                                    int64_t first_column, int lane) {
    return {p, row_block, first_column, lane};
}

#endif

template <typename T, typename Params, int kRowTiles, bool kNormed, bool kShort>
__global__ void __launch_bounds__(kSlices * 32)
    linear_tiles(const __grid_constant__ Params p, uint32_t token_blocks, int warp_bytes) {
#if TIDE_HAS_TENSOR_CORE_PATH
    constexpr bool kFp8 = kIsFp8<Params>;
    using Layout = LinearLayout<kRowTiles, kNormed, kFp8>;
    using Fp8Weight = Fp8Stream<kRowTiles, kBlockColumns>;
    constexpr int kStages = kShort ? Layout::kShortStages : Layout::kStages;
    constexpr int kStageStep = kShort ? kSlices * Layout::kBlockBytes : Layout::kStageBytes;
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int64_t row_block = blockIdx.x / token_blocks;
    const int64_t first_token = int64_t{blockIdx.x % token_blocks} * kTileTokens;

    // 1. This warp's slice, in stages, and the first of them on their way.
    const int64_t slice_begin = warp * kBlockColumns;
    const int count = blocks_before(p.in_features, slice_begin);
    const uint32_t mine = shared_address(shared) + warp * warp_bytes;
    const uint32_t x_stage = mine + (kShort ? Layout::kStageBytes : warp_bytes - Layout::kXBytes);
    const auto weight = weight_stream<kRowTiles>(p, row_block, slice_begin, lane);
    constexpr uint32_t kAllRows = (1u << (kRowTiles * (kFp8 ? Fp8Weight::Stage::kCopies : kLoadsPerTile))) - 1;
    const bool all_rows = __all_sync(~0u, weight.valid == kAllRows);
    const int full_blocks = all_rows ? blocks_before(p.in_features / kBlockColumns * kBlockColumns, slice_begin) : 0;
    const auto copy_stage = [&](int b, uint32_t stage) {
        if constexpr (kFp8) {
            const int64_t column = int64_t{b} * kStrideColumns,
                          first = Fp8Weight::Stage::copied_vector(lane) * kFp8Vector;
            if (b == 0 || p.scale_shift < kWholeRows)
                weight.copy_scales(p, stage + Layout::kScaleOffset, slice_begin + column, lane);
            if (b < full_blocks) {
                weight.copy(stage, column);
            } else {
                weight.copy_edge(stage, column, slice_begin + column + first < p.in_features, p.weight);
            }
        } else {
            weight.copy(b, stage, b < full_blocks);
        }
        if constexpr (kNormed)
            copy_norm<kBlockColumns / kVector>(p, slice_begin + int64_t{b} * kStrideColumns,
                                               stage + Layout::kNormOffset);
    };
#pragma unroll 1  // little code: it is fetched while nothing else can be done
    for (int s = 0; s < kStages; ++s) {
        if (s < count) copy_stage(s, mine + s * kStageStep);
        close_copy_group();
    }
    let_next_start();
    wait_for_previous();

    // 2. x of this lane: token g, two vectors of a stage.
    const int64_t first_k = slice_begin + t * kVector;
    const char* x = static_cast<const char*>(p.x) + ((first_token + g) * p.x_stride + first_k) * 2;
    const int64_t x_columns = p.in_features - first_k;
    const bool exists = first_token + g < p.rows;
    constexpr int kBlocksInFlight = kShort ? kStages : 1;
    uint4 xs[kBlocksInFlight][2];
    const auto fetch_x = [&](int slot_of_x, int b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t offset = int64_t{b} * kStrideColumns + half * (kBlockColumns / 2);
            xs[slot_of_x][half] = load_global(x + offset * 2, exists && b < count && offset < x_columns);
        }
    };
#pragma unroll
    for (int b = 0; b < kBlocksInFlight; ++b) fetch_x(b, b);
    const T residual = Outputs<Layout>(p, row_block, first_token).template residual<T>(p, threadIdx.x);

    // 3. The slice: 64 columns a turn.
    float sums[kRowTiles][1][4] = {};
    RowSquares<1> squares;
    const int row = lane % 8, matrix = lane / 8;
    const uint32_t weight_at = (row + matrix % 2 * 8) * kRowBytes;
    // Vector v of row r of x lies at v ^ swizzled(r): two rows that are written together are in different banks, and so
    // are eight that are read together.
    const auto swizzled = [](int r) { return r % 2 * 4 + r / 2; };
    const uint32_t x_to = x_stage + g * kRowBytes + (t ^ swizzled(g)) * kVectorBytes;
    const uint32_t x_at = x_stage + row * kRowBytes + (matrix ^ swizzled(row)) * kVectorBytes;
    const auto store_x = [&](int b) {
        store_shared(x_to + b * kStageStep, xs[b][0]);
        store_shared((x_to + b * kStageStep) ^ 4 * kVectorBytes, xs[b][1]);
    };
    uint4 raw[2];
    const auto add_squares = [&] {
        if constexpr (!kNormed) return;
        squares.add(0, raw[0]);
        squares.add(0, raw[1]);
    };
    RowFactors<kIsDealt<Params>> factors[kRowTiles];
    const auto multiply_block = [&](int b, uint32_t stage, uint32_t x_from) {
        if constexpr (kFp8) {
            if (b == 0 || p.scale_shift < kWholeRows) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) factors[m].read(stage + Layout::kScaleOffset + m * kScaleBytes);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 x_here = load_matrices(x_from ^ half * 4 * kVectorBytes);
            if constexpr (kNormed) {
                raw[half] = x_here;
                const uint32_t norm = stage + Layout::kNormOffset + (half * 4 + matrix) * kVectorBytes;
                x_here = multiply_vector(x_here, load_matrices(norm));
            }
            const auto vector_of = [&](int m, int step) {  // 16 columns, of which this lane names 8
                const int vector = half * 4 + step * 2 + matrix / 2;
                return load_matrices(stage + m * kTileBytes + weight_at + (vector ^ row) * kVectorBytes);
            };
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                uint4 first, second;
                if constexpr (kFp8) {
                    widen_tile(stage + m * Fp8Weight::Stage::kTileBytes + Fp8Weight::Stage::named(lane, half),
                               factors[m], first, second);
                } else {
                    first = vector_of(m, 0);
                    second = vector_of(m, 1);
                }
                multiply_tile(sums[m][0], first.x, first.y, first.z, first.w, x_here.x, x_here.y, T{});
                multiply_tile(sums[m][0], second.x, second.y, second.z, second.w, x_here.z, x_here.w, T{});
            }
        }
    };
    if constexpr (kShort) {
#pragma unroll
        for (int b = 0; b < kStages; ++b) {
            if (b < count) store_x(b);
        }
        wait_copy_groups<0>();
        __syncwarp();  // the other lanes' copies have arrived too
#pragma unroll 1
        for (int b = 0; b < count; ++b) {
            multiply_block(b, mine + b * kStageStep, x_at + b * kStageStep);
            add_squares();
        }
        __syncwarp();  // all lanes have read the stages before sums go there
    } else {
        int slot = 0;
        for (int b = 0; b < count; ++b) {
            store_x(0);
            fetch_x(0, b + 1);
            wait_copy_groups<kStages - 1>();
            __syncwarp();  // the other lanes' copies have arrived too
            const uint32_t stage = mine + slot * kStageStep;
            multiply_block(b, stage, x_at);
            __syncwarp();  // all lanes have read the stage before it is filled again
            if (b + kStages < count) copy_stage(b + kStages, stage);
            close_copy_group();
            add_squares();  // after the copies, which must not wait for it
            slot = slot + 1 == kStages ? 0 : slot + 1;
        }
    }

    // 4. The slices' sums, in order.
    const Outputs<Layout> outputs(p, row_block, first_token);
    finish_outputs<T, Layout>(p, shared, warp_bytes, sums, squares, 0, outputs, residual);
#else
    refuse_architecture();
#endif
}

// What one launch needs.
template <int kRowTiles, bool kNormed, bool kFp8>
struct TileLaunch {
    using Layout = LinearLayout<kRowTiles, kNormed, kFp8>;
    int64_t row_blocks, token_blocks;
    int warp_bytes, shared_bytes;

    TileLaunch(const LinearParams& p, bool is_short) {
        const int64_t columns = kRowTiles * (p.gated ? kTileRows / 2 : kTileRows);
        row_blocks = (p.out_features + columns - 1) / columns;
        token_blocks = (p.rows + kTileTokens - 1) / kTileTokens;
        const int stages = std::min(Layout::kStages, blocks_before(p.in_features, 0));
        warp_bytes = stages * Layout::kStageBytes + Layout::kXBytes;
        shared_bytes = warp_bytes * Layout::kWarps;
        if (!is_short) return;
        warp_bytes = Layout::kBlockBytes;
        shared_bytes = std::max(count_blocks(p.in_features), Layout::kWarps) * Layout::kBlockBytes;
    }
    int64_t ctas() const { return row_blocks * token_blocks; }
};

template <typename T, int kRowTiles, bool kNormed, bool kShort, typename Params>
void launch_tile_of(const Params& p, cudaStream_t stream) {
    using Needs = TileLaunch<kRowTiles, kNormed, kIsFp8<Params>>;
    const Needs needs(p, kShort);
    const LaunchShape shape = {needs.ctas(), Needs::Layout::kThreads, needs.shared_bytes, 1, Effect::kNone};
    launch(kIsFp8<Params> ? "fp8_linear" : "linear", linear_tiles<T, Params, kRowTiles, kNormed, kShort>, shape, stream,
           p, static_cast<uint32_t>(needs.token_blocks), needs.warp_bytes);
}

// All of x at once, unless its buffer needs more than there is, or keeps two CTAs from sharing a multiprocessor
// where there are more of them than those.
template <typename T, int kRowTiles, bool kNormed, typename Params>
void launch_tile(const Params& p, cudaStream_t stream) {
    using Needs = TileLaunch<kRowTiles, kNormed, kIsFp8<Params>>;
    const DeviceInfo device = current_device("linear");
    const Needs needs(p, true);
    const int most = device.shared_bytes, each = needs.ctas() > device.num_sms ? 2 : 1;
    const bool is_short = blocks_before(p.in_features, 0) <= Needs::Layout::kShortStages;
    if (is_short && each * needs.shared_bytes <= most) return launch_tile_of<T, kRowTiles, kNormed, true>(p, stream);
    launch_tile_of<T, kRowTiles, kNormed, false>(p, stream);
}

// Whether tile kIndex of kLinearTiles is the one, and was launched.
template <typename T, bool kNormed, size_t kIndex, typename Params>
bool launch_if_chosen(const Params& p, const LinearTile& tile, cudaStream_t stream) {
    constexpr LinearTile kTile = kLinearTiles[kIndex];
    if constexpr (!has_kernel(kTile, kNormed, kIsFp8<Params>)) {
        return false;
    } else {
        if (!(tile == kTile)) return false;
        if constexpr (kTile.staged) {
            constexpr int kRowTiles = kTile.row_tiles, kTokenTiles = kTile.token_tiles;
            launch_staged<T, StagedLayout<kRowTiles, kTokenTiles, kTile.cluster, kTile.deep, kNormed, Params>>(p,
                                                                                                               stream);
        } else {
            launch_tile<T, kTile.row_tiles, kNormed>(p, stream);
        }
        return true;
    }
}

template <typename T, bool kNormed, typename Params, size_t... kIndices>
bool launch_chosen(const Params& p, const LinearTile& tile, cudaStream_t stream, std::index_sequence<kIndices...>) {
    return (launch_if_chosen<T, kNormed, kIndices>(p, tile, stream) || ...);
}

template <typename T, bool kNormed, typename Params>
void launch_linear_tiles(const Params& p, const LinearTile& tile, cudaStream_t stream) {
    if (!launch_chosen<T, kNormed>(p, tile, stream, std::make_index_sequence<std::size(kLinearTiles)>()))
        throw std::logic_error("linear: a tile was chosen that is not built");
}

}  // namespace tide::cuda
