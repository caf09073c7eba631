// What one warp of the streaming attention keeps. Query heads (query, head) are the columns of its products,
// eight to a tile, so that one query of a small heads_per_kv wastes little:
//
//     scores [16 positions, 8 query heads] = K [16 positions, dims] Q^T
//     sums   [dims, 8 query heads]        += V^T [dims, 16 positions] weights [16 positions, 8 query heads]
//
// Thread (g = lane / 4, t = lane % 4) holds query heads 2t and 2t + 1 of each tile, of scores and sums alike.
#pragma once

#include "cuda/attention/tiles_state.cuh"
#include "cuda/common/ptx/bulk_copy.cuh"

namespace tide::cuda {

// kDim: head_dim, 64 or 128. kQueryTiles: 8 query heads each. The warps divide a chunk among them, tile by tile;
// numbers depend on kDim, but not on kQueryTiles.
template <int kDim_, int kLaneTiles_>
struct StreamLayout {
    static constexpr int kDim = kDim_, kQueryTiles = kLaneTiles_, kQueryHeads = kQueryTiles * 8;
    static constexpr int kWarps = 8, kThreads = kWarps * 32;
    static constexpr int kCtasPerSm = kQueryTiles > 2 ? 1 : 2;  // what the registers allow
    static constexpr bool kHoldsPiece = kQueryTiles == 1;       // in registers: quicker, where there are some left
    static constexpr int kStridePositions = kWarps * kTilePositions;  // from a tile of a warp to its next
    static constexpr int kLines = kDim / kLineElements;               // of a row
    static constexpr int kSteps = kDim / 16;                          // products of a tile
    static constexpr int kBoxBytes = kTilePositions * kLineBytes;
    static constexpr int kPoolBytes = kLines * kBoxBytes;  // the keys of a tile, or its values
    static constexpr int kTileBytes = 2 * kPoolBytes;
    static constexpr int kQueryBytes = kQueryHeads * kDim * 2;   // of a piece; the next one has its own
    static constexpr int kSumRows = 8;                           // query heads whose sums the warps add at once
    static constexpr int kSumStride = kDim + 4;                  // floats of a query head, so that no bank is hit twice
    static constexpr int kSumBytes = kSumRows * kSumStride * 4;  // of a warp
    static constexpr int kSumPlaces = kCtasPerSm == 1 ? 2 : 1;   // filled in turn
    static constexpr int kMostStages = tuning::kStreamStages;    // tiles on their way to a warp
};

#if TIDE_HAS_BULK_COPY

__device__ inline uint4 load_transposed_matrices(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

// An 8x8 matrix that the warp holds, rows for columns.
__device__ inline uint32_t transpose_matrix(uint32_t rows) {
    uint32_t columns;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

// Which positions the query heads of a piece see: query heads come in the order of their positions.
struct VisibleRange {
    int first_query_head, first_end,
        visible;  // the first query covers `visible` positions before first_end, the next one more

    __device__ VisibleRange(const AttentionWork& p, const Piece& piece) : visible(p.visible) {
        const int query = p.by_heads_per_kv(piece.first_query_head);
        first_query_head = piece.first_query_head - query * p.heads_per_kv;
        first_end = piece.position_of(query) + 1;
    }
    __device__ int end(const AttentionWork& p, int lane) const {
        return first_end + p.by_heads_per_kv(first_query_head + lane);
    }
};

// Where a thread reads vector `vector` of a row of a box, and from there every other vector of the row.
template <typename Layout, int kRows>
struct RowReader {
    uint32_t at[Layout::kLines];

    __device__ RowReader(uint32_t box, int row, int vector) {
#pragma unroll
        for (int line = 0; line < Layout::kLines; ++line)
            at[line] = box + line_offset(kRows, row, line * kLineVectors + vector);
    }
    // `further` vectors, an even number that does not carry into those of `vector`.
    __device__ uint32_t operator()(int further) const {
        return at[further / kLineVectors] ^ (further % kLineVectors * kVectorBytes);
    }
};

template <typename T, typename Layout>
struct StreamState {
    static constexpr int kQueryTiles = Layout::kQueryTiles, kSteps = Layout::kSteps;
    static constexpr bool kHolds = kQueryTiles == 1;  // the queries, in registers
    // Weights are exp2(score - base). A base follows the largest score only when that is 2^kSlack times as heavy.
    static constexpr float kSlack = 8.0f;
    float sums[kQueryTiles][kSteps][4] = {};
    float bases[2 * kQueryTiles];
    float totals[2 * kQueryTiles] = {};  // of this thread's positions only
    uint32_t queries;                    // their shared address
    uint4 held[kHolds ? kSteps / 2 : 1];

    __device__ StreamState(uint32_t queries, int lane) : queries(queries) {
#pragma unroll
        for (float& base : bases) base = kNothing;
        if (kHolds) {
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) held[step / 2] = load_queries(0, step, lane);
        }
    }

    // `tile` is a shared address. `masked`: some query head may not see all of the 16 positions from `first`. Only the
    // first kUsed query tiles have query heads.
    template <int kUsed>
    __device__ void accumulate(const AttentionWork& p, const ScoreScale& scale, uint32_t tile, bool masked, int first,
                               const Piece& piece, int lane) {
        const int t = lane % 4, g = lane / 4;
        float scores[kUsed][4] = {}, more[kUsed][4] = {};  // every other product, to wait less for the last
        const RowReader<Layout, kTilePositions> keys(tile, lane % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
            const uint4 low = load_matrices(keys(step * 2)), high = load_matrices(keys(step * 2 + 2));
#pragma unroll
            for (int m = 0; m < kUsed; ++m) {
                const uint4 q = kHolds ? held[step / 2] : load_queries(m, step, lane);
                multiply_tile(scores[m], low.x, low.y, low.z, low.w, q.x, q.y, T{});
                multiply_tile(more[m], high.x, high.y, high.z, high.w, q.z, q.w, T{});
            }
        }
        bool grew = false;
        const auto each = [&](auto&& change) {
#pragma unroll
            for (int m = 0; m < kUsed; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) change(scores[m][i], m, i);
            }
        };
        each([&](float& score, int m, int i) { score = __fmul_rn(score + more[m][i], scale.scale); });
        if (scale.cap > 0.0f) each([&](float& score, int, int) { score = scale.quick_cap(score); });
        if (masked) {
            const VisibleRange visible_range(p, piece);
            each([&](float& score, int m, int i) {
                const int position = first + i / 2 * 8 + g, end = visible_range.end(p, m * 8 + t * 2 + i % 2);
                if (position >= end || position < end - visible_range.visible) score = kNothing;
            });
        }
#pragma unroll
        for (int m = 0; m < kUsed; ++m) {
#pragma unroll
            for (int c = 0; c < 2; ++c) grew |= fmaxf(scores[m][c], scores[m][2 + c]) > bases[2 * m + c] + kSlack;
        }
        if (__any_sync(~0u, grew)) raise_bases(scores);
        uint32_t weights[kUsed][2];
#pragma unroll
        for (int m = 0; m < kUsed; ++m) {
            float w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = exp2_fast(scores[m][i] - base_of(bases[2 * m + i % 2]));
#pragma unroll
            for (int c = 0; c < 2; ++c) totals[2 * m + c] += w[c] + w[2 + c];
#pragma unroll
            for (int r = 0; r < 2; ++r) weights[m][r] = transpose_matrix(pack(w[2 * r], w[2 * r + 1], T{}));
        }
        const RowReader<Layout, kTilePositions> values(tile + Layout::kPoolBytes, lane % 8 + lane / 16 * 8,
                                                       lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint4 v = load_transposed_matrices(values(step * 2));
#pragma unroll
            for (int m = 0; m < kUsed; ++m)
                multiply_tile(sums[m][step], v.x, v.y, v.z, v.w, weights[m][0], weights[m][1], T{});
        }
    }

    // The same for as many query heads as there are.
    __device__ void accumulate_used(int query_heads, const AttentionWork& p, const ScoreScale& scale, uint32_t tile,
                                    bool masked, int first, const Piece& piece, int lane) {
        if constexpr (kQueryTiles > 1) {
            if (query_heads <= 8) return accumulate<1>(p, scale, tile, masked, first, piece, lane);
        }
        if constexpr (kQueryTiles > 2) {
            if (query_heads <= 16) return accumulate<2>(p, scale, tile, masked, first, piece, lane);
        }
        accumulate<kQueryTiles>(p, scale, tile, masked, first, piece, lane);
    }

    // Sums [lane][dim] and stats [lane] of query tile m to shared memory.
    __device__ void store_partial(int m, float* to, float2* stats, int lane) {
        const int t = lane % 4, g = lane / 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float total = totals[2 * m + c];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
            if (g == 0) stats[2 * t + c] = make_float2(bases[2 * m + c], total);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    to[(2 * t + c) * Layout::kSumStride + step * 16 + r * 8 + g] = sums[m][step][2 * r + c];
            }
        }
    }

    // The same for a query tile that the compiler does not know: what follows is in the program once.
    __device__ void store_partial_of(int m, float* to, float2* stats, int lane) {
        if constexpr (kQueryTiles == 4) {
            if (m == 3) return store_partial(3, to, stats, lane);
            if (m == 2) return store_partial(2, to, stats, lane);
        }
        if constexpr (kQueryTiles > 1) {
            if (m == 1) return store_partial(1, to, stats, lane);
        }
        store_partial(0, to, stats, lane);
    }

  private:
    // Of the query heads of tile m, the dims of two products.
    __device__ uint4 load_queries(int m, int step, int lane) const {
        return load_matrices(RowReader<Layout, Layout::kQueryHeads>(queries, m * 8 + lane % 8, lane / 8)(step * 2));
    }

    // Each query head's base depends on its own scores alone.
    template <int kUsed>
    __device__ void raise_bases(const float (&scores)[kUsed][4]) {
#pragma unroll
        for (int m = 0; m < kUsed; ++m) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int at = 2 * m + c;
                float max_score = fmaxf(scores[m][c], scores[m][2 + c]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, step));
                const float base = max_score > bases[at] + kSlack ? max_score : bases[at];
                const float shrink = exp2_fast(bases[at] - base_of(base));
                bases[at] = base;
                totals[at] *= shrink;
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    sums[m][step][c] *= shrink;
                    sums[m][step][2 + c] *= shrink;
                }
            }
        }
    }
};

#endif

}  // namespace tide::cuda
