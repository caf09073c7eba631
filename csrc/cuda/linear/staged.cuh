// The linear for 9 to 64 rows: weight and x both go through shared memory, 32 columns of a slice a stage.
//
// A stage of a warp, copied in the background:
//
//     16 weight rows x 64 bytes for each row tile, then 8 rows of x x 64 bytes for each token tile, then, with a norm,
//     64 bytes of its weight
//
// Lane l copies vector l % 4 of row l / 4 of every 8 rows; vector v of row r lies at v ^ r / 2 % 4, so that 8 rows of a
// column of vectors are in different banks. See linear_sums.cuh for the order of the sums; it is the same here, bit for
// bit.
//
// Weights in E4M3 (fp8_weight.cuh) take half of the bytes: where stages stay many they have 64 columns, of x two times
// the 32 above.
#pragma once

#include <algorithm>

#include "cuda/linear/fp8_weight.cuh"
#include "cuda/linear/sums.cuh"

namespace tide::cuda {

constexpr int kPartColumns = 32;  // of x, that lie together in a stage
constexpr int kEightRowBytes = 8 * kPartColumns * 2;
constexpr int kFewestWideStages = 3;  // of 64 columns, else they have 32

// Of E4M3 weights with their scales, x and a norm, `columns` of them.
constexpr int fp8_stage_bytes(int row_tiles, int token_tiles, bool normed, int columns) {
    const int weights = row_tiles * (kTileRows * columns + kScaleBytes);
    return weights + (token_tiles * kTileTokens + (normed ? 1 : 0)) * columns * 2;
}

// kDeep: for grids of one CTA per multiprocessor, which then needs all of the memory to have enough on its way.
template <int kRowTiles, int kTokenTiles, int kCluster, bool kDeep, bool kNormed, typename Params_ = LinearParams>
struct StagedLayout : LinearShape<kRowTiles, kTokenTiles, kCluster, kNormed> {
    using Shape = LinearShape<kRowTiles, kTokenTiles, kCluster, kNormed>;
    using Params = Params_;
    static constexpr bool kFp8 = kIsFp8<Params>;
    static constexpr int kWarpBytes = kSharedOfCta90 / Shape::kWarps / (kDeep ? 1 : 2);  // one or two CTAs fit sm_90
    static constexpr int kTwoPartBytes = fp8_stage_bytes(kRowTiles, kTokenTiles, kNormed, 2 * kPartColumns);
    static constexpr bool kIsWide = kFp8 && kTwoPartBytes * kFewestWideStages <= kWarpBytes;
    static constexpr int kParts = kIsWide ? 2 : 1, kColumns = kParts * kPartColumns;  // of a stage
    static constexpr int kStepsPerBlock = kBlockColumns / kColumns;
    static constexpr int kTileBytes = kTileRows * kColumns * (kFp8 ? 1 : 2);
    static constexpr int kXOffset = kRowTiles * kTileBytes;
    static constexpr int kNormOffset = kXOffset + kParts * kTokenTiles * kEightRowBytes;
    static constexpr int kScaleOffset = kNormOffset + (kNormed ? kColumns * 2 : 0);
    static constexpr int kStageBytes = kScaleOffset + (kFp8 ? kRowTiles * kScaleBytes : 0);
    static constexpr int kCtasPerSm = kDeep || kRowTiles * kTokenTiles > 16 ? 1 : 2;  // the latter by registers
    static constexpr int kStages = std::min(kDeep ? 8 : 6, kWarpBytes / kStageBytes);
};

#if TIDE_HAS_TENSOR_CORE_PATH

// Where a vector of a row lies in 8 rows of a stage.
__device__ inline uint32_t staged_offset(int row, int vector) {
    return row * (kPartColumns * 2) + (vector ^ (row / 2 % 4)) * kVectorBytes;
}

// One lane's part of the weight rows of its warp.
template <int kRowTiles>
struct StagedWeight {
    static constexpr int kLoads = 2 * kRowTiles;
    const char* from;         // vector lane % 4 of row lane / 4 of the first tile, at column 0 of the slice
    int64_t tile_step, half;  // bytes to the next tile, and to the second 8 rows of a tile
    uint32_t valid;           // bit 2 * tile + half: that row exists

    __device__ StagedWeight(const LinearParams& p, int64_t row_block, int64_t slice_begin, int lane) {
        const int64_t row_bytes = p.in_features * 2;
        const int64_t tile_columns = p.gated ? kTileRows / 2 : kTileRows;  // columns of y per row tile
        const int64_t column = row_block * kRowTiles * tile_columns + lane / 4;
        from = static_cast<const char*>(p.weight) + column * row_bytes + (slice_begin + lane % 4 * kVector) * 2;
        tile_step = tile_columns * row_bytes;
        half = p.gated ? p.out_features * row_bytes : 8 * row_bytes;
        valid = 0;
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const int64_t here = column + i / 2 * tile_columns + (p.gated ? 0 : i % 2 * 8);
            valid |= static_cast<uint32_t>(here < p.out_features) << i;
        }
    }

    // `offset`: bytes from column 0 of the slice. All rows and columns exist.
    __device__ void copy(uint32_t to, int64_t offset) const {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i)
            copy_async_128(to + i * kEightRowBytes, from + offset + i / 2 * tile_step + i % 2 * half);
    }
    // Zeros for what does not exist. Little code: this is for the edges.
    __device__ void copy_edge(uint32_t to, int64_t offset, bool in_columns, const void* safe) const {
#pragma unroll 1
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const bool here = in_columns && (valid >> i & 1);
            copy_async_or_zero(to + i * kEightRowBytes, here ? from + offset + i / 2 * tile_step + i % 2 * half : safe,
                               here);
        }
    }
};

#endif

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kCtasPerSm)
    linear_staged(const __grid_constant__ typename Layout::Params p, uint32_t token_blocks, int warp_bytes) {
#if TIDE_HAS_TENSOR_CORE_PATH
    constexpr int kStages = Layout::kStages, kCluster = Layout::kCluster;
    constexpr int kRowTiles = Layout::kRowTiles, kTokenTiles = Layout::kTokenTiles;
    constexpr int kColumns = Layout::kColumns, kParts = Layout::kParts, kStepsPerBlock = Layout::kStepsPerBlock;
    constexpr bool kNormed = Layout::kNormed, kFp8 = Layout::kFp8;
    using Weight = std::conditional_t<kFp8, Fp8Stream<kRowTiles, kColumns>, StagedWeight<kRowTiles>>;
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x % kCluster;
    const int64_t row_block = blockIdx.x / kCluster / token_blocks;
    const int64_t first_token = int64_t{blockIdx.x / kCluster % token_blocks} * Layout::kTokens;

    // 1. The weights of the first stages.
    const int64_t slice_begin = (rank * Layout::kWarps + warp) * kBlockColumns;
    const int count = kStepsPerBlock * blocks_before(p.in_features, slice_begin);
    const int64_t columns = p.in_features - slice_begin - lane % 4 * kVector;  // left from this lane's vector
    const uint32_t mine = shared_address(shared) + warp * warp_bytes, to_lane = staged_offset(lane / 4, lane % 4);
    const Weight weight(p, row_block, slice_begin, lane);
    const auto first_column = [](int step) {  // of the step, from the begin of the slice
        return static_cast<int64_t>(step / kStepsPerBlock) * kStrideColumns + step % kStepsPerBlock * kColumns;
    };
    int whole = count;  // steps whose columns all exist
    while (whole > 0 && slice_begin + first_column(whole - 1) + kColumns > p.in_features) --whole;
    const bool all_rows = __all_sync(~0u, weight.valid == (1u << Weight::kLoads) - 1);
    const int whole_weight = all_rows ? whole : 0;
    const auto copy_weight = [&](int step, uint32_t to) {
        if constexpr (kNormed)
            copy_norm<kColumns / kVector>(p, slice_begin + first_column(step), to + Layout::kNormOffset);
        if constexpr (kFp8) {
            const int64_t column = first_column(step);
            if (step == 0 || p.scale_shift < kWholeRows)
                weight.copy_scales(p, to + Layout::kScaleOffset, slice_begin + column, lane);
            if (step < whole_weight) return weight.copy(to, column);
            const int64_t first = slice_begin + column + Weight::Stage::copied_vector(lane) * kFp8Vector;
            weight.copy_edge(to, column, first < p.in_features, p.weight);
        } else {
            to += to_lane;
            if (step < whole_weight) return weight.copy(to, first_column(step) * 2);
            weight.copy_edge(to, first_column(step) * 2, first_column(step) < columns, p.weight);
        }
    };
#pragma unroll 1  // little code: it is fetched while nothing else can be done
    for (int s = 0; s < kStages; ++s) {
        if (s < count) copy_weight(s, mine + s * Layout::kStageBytes);
    }
    close_copy_group();
    let_next_start();
    wait_for_previous();

    // 2. x of the first stages. Rows that do not exist are left as they are: they touch no other row's sums.
    const int tokens = static_cast<int>(min(p.rows - first_token - lane / 4, static_cast<int64_t>(Layout::kTokens)));
    const char* x =
        static_cast<const char*>(p.x) + ((first_token + lane / 4) * p.x_stride + slice_begin + lane % 4 * kVector) * 2;
    const int64_t x_tile_step = kTileTokens * p.x_stride * 2;
    const auto copy_x = [&](int step, uint32_t to) {
        const bool here = step < whole || first_column(step) < columns;
        const char* source = here ? x + first_column(step) * 2 : x;
        to += to_lane;
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
            if (n * kTileTokens < tokens)
                copy_async_or_zero(to + Layout::kXOffset + n * kEightRowBytes, source + n * x_tile_step, here);
        }
        if constexpr (kParts > 1) {
            const bool next_here = step < whole || first_column(step) + kPartColumns < columns;
            const char* next = next_here ? source + kPartColumns * 2 : x;
#pragma unroll
            for (int n = kTokenTiles; n < 2 * kTokenTiles; ++n) {
                if ((n - kTokenTiles) * kTileTokens < tokens)
                    copy_async_or_zero(to + Layout::kXOffset + n * kEightRowBytes,
                                       next + (n - kTokenTiles) * x_tile_step, next_here);
            }
        }
    };
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) {
        if (s < count) copy_x(s, mine + s * Layout::kStageBytes);
        close_copy_group();
    }
    const T residual =
        Outputs<Layout>(p, row_block, first_token).template residual<T>(p, rank * Layout::kThreads + threadIdx.x);

    // 3. The slice.
    float sums[kRowTiles][kTokenTiles][4] = {};
    RowSquares<kTokenTiles> squares;
    const uint32_t weight_at = staged_offset(lane % 8, lane / 16) + lane / 8 % 2 * kEightRowBytes;
    const uint32_t x_at = staged_offset(lane % 8, lane / 8) + Layout::kXOffset;
    RowFactors<kIsDealt<typename Layout::Params>> factors[kRowTiles];
    uint32_t stage = mine;
    for (int step = 0; step < count; ++step) {
        wait_copy_groups<kStages - 1>();
        __syncwarp();  // the other lanes' copies have arrived too
        if constexpr (kFp8) {
            if (step == 0 || p.scale_shift < kWholeRows) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) factors[m].read(stage + Layout::kScaleOffset + m * kScaleBytes);
            }
        }
        int part = 0;
        do {  // no `for`: the compiler makes other code of half-width weights, whose only turn this is
            uint4 xs[kTokenTiles];
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
                xs[n] = load_matrices(stage + x_at + (part * kTokenTiles + n) * kEightRowBytes);
            if constexpr (kNormed) {
                const uint32_t norm_at = stage + Layout::kNormOffset + lane / 8 * kVectorBytes;
                const uint4 norm = load_matrices(norm_at + part * kPartColumns * 2);
#pragma unroll
                for (int n = 0; n < kTokenTiles; ++n) {
                    squares.add(n, xs[n]);
                    xs[n] = multiply_vector(xs[n], norm);
                }
            }
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                const uint32_t at = stage + m * Layout::kTileBytes;
                uint4 first, second;
                if constexpr (kFp8) {
                    widen_tile(at + Weight::Stage::named(lane, part), factors[m], first, second);
                } else {
                    first = load_matrices(at + weight_at);
                    second = load_matrices(at + (weight_at ^ 2 * kVectorBytes));
                }
#pragma unroll
                for (int n = 0; n < kTokenTiles; ++n)
                    multiply_tile(sums[m][n], first.x, first.y, first.z, first.w, xs[n].x, xs[n].y, T{});
#pragma unroll
                for (int n = 0; n < kTokenTiles; ++n)
                    multiply_tile(sums[m][n], second.x, second.y, second.z, second.w, xs[n].z, xs[n].w, T{});
            }
        } while (++part < kParts);
        __syncwarp();  // all lanes have read the stage before it is filled again
        if (step + kStages < count) {
            copy_weight(step + kStages, stage);
            copy_x(step + kStages, stage);
        }
        close_copy_group();
        stage =
            stage + Layout::kStageBytes == mine + kStages * Layout::kStageBytes ? mine : stage + Layout::kStageBytes;
    }
    const Outputs<Layout> outputs(p, row_block, first_token);
    finish_outputs<T, Layout>(p, shared, warp_bytes, sums, squares, rank, outputs, residual);
#else
    refuse_architecture();
#endif
}

template <typename T, typename Layout>
void launch_staged(const typename Layout::Params& p, cudaStream_t stream) {
    const int64_t columns = Layout::kRowTiles * (p.gated ? kTileRows / 2 : kTileRows);
    const int64_t row_blocks = (p.out_features + columns - 1) / columns;
    const int64_t token_blocks = (p.rows + Layout::kTokens - 1) / Layout::kTokens;
    const int stages = std::min(Layout::kStages, Layout::kStepsPerBlock * blocks_before(p.in_features, 0));
    const int warp_bytes = std::max(stages * Layout::kStageBytes, Layout::kSumBytes);
    const LaunchShape shape = {row_blocks * token_blocks * Layout::kCluster, Layout::kThreads,
                               warp_bytes * Layout::kWarps, Layout::kCluster, Effect::kNone};
    launch(Layout::kFp8 ? "fp8_linear" : "linear", linear_staged<T, Layout>, shape, stream, p,
           static_cast<uint32_t>(token_blocks), warp_bytes);
}

}  // namespace tide::cuda
