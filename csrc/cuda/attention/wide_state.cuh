// What four warps of the wide attention keep. Query heads (query, head) are the rows of their products: a query head's
// softmax stays within four threads, and weights go from one product to the next in registers.
//
//     scores [64 query heads, 64 positions] = Q [64 query heads, dims] K^T
//     sums   [64 query heads, dims]         = weights [64 query heads, 64 positions] V
//
// Thread (g = lane / 4, t = lane % 4) of warp w holds query head 8w + g, and where there are more than 32 also 32 + 8w
// + g, at positions or dims 2t and 2t + 1 of each 8. What query heads that do not exist see is of no matter.
//
// Numbers are those of the streaming attention, bit by bit. A tile is what one of its warps would accumulate, every
// eighth page of a chunk, one page after the other; then the tiles of a warpgroup are merged as there the even or the
// odd warps are.
#pragma once

#include "cuda/attention/store.cuh"
#include "cuda/attention/stream_ring.cuh"
#include "cuda/common/ptx/warpgroup.cuh"

namespace tide::cuda {

constexpr int kWideTiles = 8;  // of a chunk, one for each warp of the streaming attention
constexpr int kWidePages = kChunk / kTilePositions / kWideTiles;  // of 16 positions, of a tile

// kDim: head_dim, 64 or 128. kRows: query heads of a thread, 1 or 2. Two warpgroups take a chunk's tiles in turn.
template <int kDim_, int kRows_>
struct WideHeads {
    static constexpr int kDim = kDim_, kRows = kRows_, kQueryHeads = 32 * kRows;
    static constexpr int kWarpgroups = 2;
    static constexpr int kThreads = kWarpgroups * kWarpgroupThreads, kWarps = kThreads / 32;  // that multiply
    static constexpr int kAllThreads = kThreads + 128;   // three producer warps and an idle one
    static constexpr int kLines = kDim / kLineElements;  // of a row
    static constexpr int kSteps = kDim / 16;             // products of a score
    static constexpr int kPageBytes = kTilePositions * kDim * 2;
    static constexpr int kPoolBytes = kWidePages * kPageBytes;  // the keys of a tile, or its values
    static constexpr int kTileBytes = 2 * kPoolBytes;
    static constexpr int kQueryBytes = kQueryHeads * kDim * 2;  // of a piece; the next one has its own
    static constexpr int kSums = kDim / 4;                      // of a query head, that a thread has
    static constexpr int kExchanged = kRows * kSums / 2;        // that a thread hands to the other warpgroup
    static constexpr int kExchangedBytes = kWarpgroupThreads * kExchanged * 4;
    static constexpr int kMostStages = tuning::kWideStages;
};

// The tiles of a piece. Pages that lie before all windows or past the end are not brought: those that are lie at the
// beginning of their tile.
struct WideTiles {
    int begin, end;   // positions of the piece
    int first, upto;  // pages of the chunk that are brought

    __device__ WideTiles(const AttentionWork& p, const Piece& piece) : begin(piece.begin()), end(piece.end()) {
        const int low = span_of(p, piece.position_of(p.by_heads_per_kv(piece.first_query_head))).low;
        first = max(low - begin, 0) / kTilePositions;
        upto = (end - begin + kTilePositions - 1) / kTilePositions;
    }
    __device__ int skipped(int tile) const { return max(first - tile + kWideTiles - 1, 0) / kWideTiles; }
    __device__ int pages(int tile) const { return max(upto - tile + kWideTiles - 1, 0) / kWideTiles - skipped(tile); }
    __device__ int position(int tile) const {  // of its first page
        return begin + (tile + skipped(tile) * kWideTiles) * kTilePositions;
    }
};

constexpr int kWideStep = kWideTiles * kTilePositions;  // positions from a page of a tile to its next

// What is to be known of a tile.
struct HeldTile {
    uint32_t at;       // its shared address
    int pages, first;  // how many it has; position of the first
    bool masked;       // some query head may not see all of it
};

template <typename T, typename Layout>
struct WideState {
    // Weights are exp2(score - base). A base follows the largest score only when that is 2^kSlack times as heavy.
    static constexpr float kSlack = 8.0f;
    static constexpr int kRows = Layout::kRows;
    float sums[kRows][Layout::kSums] = {};  // of all tiles so far
    Merger mergers[kRows];
    int lows[kRows], ends[kRows];  // of the positions that this thread's query heads see
    bool exists[kRows];

    // `warp`: of the warpgroup.
    __device__ WideState(const AttentionWork& p, const Piece& piece, int warp, int lane) {
        const VisibleRange visible_range(p, piece);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int index = warp * 8 + lane / 4 + r * 32, end = visible_range.end(p, index);
            lows[r] = end - p.visible;
            ends[r] = min(end, piece.end());
            exists[r] = index < piece.num_query_heads;
        }
    }

    // `from`: shared address of the queries; `warp`: of the warpgroup. Keys and values of the tile are there after
    // await_keys() and await_values(); any() is true for all threads of the warpgroup if it is for one.
    template <typename AwaitKeys, typename AwaitValues, typename Any>
    __device__ void accumulate(const ScoreScale& scale, const HeldTile& tile, uint32_t from, int warp, int lane,
                               AwaitKeys&& await_keys, AwaitValues&& await_values, Any&& any) {
        // Read for each tile: held from one to the next they took registers, which the compiler gave to others too.
        uint4 queries[Layout::kSteps];
        const int row = warp * 8 + lane % 8 + lane / 8 % 2 * (Layout::kQueryHeads - 32);
#pragma unroll
        for (int step = 0; step < Layout::kSteps; ++step)
            queries[step] = load_matrices(from + line_offset(Layout::kQueryHeads, row, step * 2 + lane / 16));
        await_keys();
        float scores[32], more[32];  // every other product
        pin_registers(queries);
        begin_products();
#pragma unroll
        for (int step = 0; step < Layout::kSteps; ++step) {
            const uint64_t keys = line_of(tile.at, step / 4) + step % 4 * kNextColumns;
            multiply_held<false>(step % 2 ? more : scores, queries[step], keys, step >= 2, T{});
        }
        close_products();
        wait_products<0>();
        pin_registers(scores);
        pin_registers(more);
        QueryState query_heads[kRows];
        bool grows = false;  // after the first page
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            grows |= prepare(query_heads[r], scores, more, scale, tile, r, lane) && exists[r];
        }
        // All pages at once; or, where a base rises again, one after the other: a weight of zero changes nothing.
        float mine[Layout::kLines][32];
        const int turns = any(grows) ? kWidePages : 1;
        await_values();
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
            for (int r = 0; r < kRows && turn > 0; ++r) query_heads[r].raise(query_heads[r].max_score(turn), mine, r);
            uint4 weights[kWidePages];
#pragma unroll
            for (int page = 0; page < kWidePages; ++page) {
                const bool now = turns == 1 || page == turn;
                weigh(query_heads[0], scores, now, page, 0, weights[page].x, weights[page].z);
                if constexpr (kRows > 1) {
                    weigh(query_heads[1], scores, now, page, 1, weights[page].y, weights[page].w);
                } else {  // their products are not used
                    weights[page].y = weights[page].x;
                    weights[page].w = weights[page].z;
                }
            }
            pin_registers(weights);
            pin_lines(mine);
            begin_products();
#pragma unroll
            for (int page = 0; page < kWidePages; ++page)
                add_page(mine, weights[page], tile, page, page > 0 || turn > 0);
            close_products();
            wait_products<0>();
            pin_lines(mine);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            merge(query_heads[r], mine, r);
        }
    }

  private:
    // Eight rows of a line, and all that follow, from `rows` on.
    __device__ static uint64_t line_of(uint32_t rows, int line) {
        return lines_at(rows + line * 8 * kLineBytes, Layout::kLines);
    }

    // A query head's part of a tile.
    struct QueryState {
        float base = kNothing, max_scores[kWidePages], totals[2] = {};  // of this thread's positions only, but base

        __device__ float max_score(int page) const {
            return page == 1 ? max_scores[1] : page == 2 ? max_scores[2] : max_scores[3];
        }

        // After a page whose largest score among this thread's is `max_score`. Depends on the query head's own scores
        // alone.
        __device__ float raise(float max_score) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, step));
            const float next = max_score > base + kSlack ? max_score : base, shrink = exp2_fast(base - base_of(next));
            base = next;
            return shrink;
        }
        __device__ void raise(float max_score, float (&sums)[Layout::kLines][32], int r) {
            const float shrink = raise(max_score);
#pragma unroll
            for (float& total : totals) total *= shrink;
            each_sum(r, [&](int, int line, int i) { sums[line][i] *= shrink; });
        }
    };

    __device__ static void pin_lines(float (&lines)[Layout::kLines][32]) {
#pragma unroll
        for (int line = 0; line < Layout::kLines; ++line) pin_registers(lines[line]);
    }

    // change(at, line, i) for the sums of query head r: at, of those; line and i, where the products have it.
    template <typename Change>
    __device__ static void each_sum(int r, Change&& change) {
#pragma unroll
        for (int line = 0; line < Layout::kLines; ++line) {
#pragma unroll
            for (int i = 0; i < 16; ++i) change(line * 16 + i, line, i / 2 * 4 + 2 * r + i % 2);
        }
    }

    // From products to scores. Whether the base must be raised again after the first page, for what this thread knows.
    __device__ bool prepare(QueryState& of, float (&scores)[32], const float (&more)[32], const ScoreScale& scale,
                            const HeldTile& tile, int r, int lane) const {
        const auto each = [&](auto&& change) {
#pragma unroll
            for (int i = 0; i < 16; ++i) change(i / 2 * 4 + 2 * r + i % 2);
        };
        each([&](int i) { scores[i] = __fmul_rn(scores[i] + more[i], scale.scale); });
        if (scale.cap > 0.0f) each([&](int i) { scores[i] = scale.quick_cap(scores[i]); });
        if (tile.masked) {
            each([&](int i) {
                const int position = tile.first + i / 8 * kWideStep + lane % 4 * 2 + i / 4 % 2 * 8 + i % 2;
                if (position >= ends[r] || position < lows[r]) scores[i] = kNothing;
            });
        }
#pragma unroll
        for (float& max_score : of.max_scores) max_score = kNothing;
        each([&](int i) { of.max_scores[i / 8] = fmaxf(of.max_scores[i / 8], scores[i]); });
        of.raise(of.max_scores[0]);
        return fmaxf(fmaxf(of.max_scores[1], of.max_scores[2]), of.max_scores[3]) > of.base + kSlack;
    }

    // The weights of query head r for a page, or zeros, as they are the left side of the next product.
    __device__ static void weigh(QueryState& of, const float (&scores)[32], bool now, int page, int r, uint32_t& low,
                                 uint32_t& high) {
        const float used = base_of(of.base);
        const float* mine = scores + page * 8 + 2 * r;
        float w[4] = {mine[0], mine[1], mine[4], mine[5]};
#pragma unroll
        for (float& one : w) one = now ? exp2_fast(one - used) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) of.totals[i] += w[i] + w[2 + i];
        low = pack(w[0], w[1], T{});
        high = pack(w[2], w[3], T{});
    }

    // Weights of a page times its values. One that the tile does not have has no weight: any values will do.
    __device__ static void add_page(float (&to)[Layout::kLines][32], const uint4& weights, const HeldTile& tile,
                                    int page, bool add) {
        const uint32_t values = tile.at + Layout::kPoolBytes + (page < tile.pages ? page * Layout::kPageBytes : 0);
#pragma unroll
        for (int line = 0; line < Layout::kLines; ++line)
            multiply_held<true>(to[line], weights, line_of(values, line), add, T{});
    }

    // A tile's sums on top of those so far.
    __device__ void merge(const QueryState& of, const float (&tile_sums)[Layout::kLines][32], int r) {
        float total = of.totals[0] + of.totals[1];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        Merger& merger = mergers[r];
        merger.add(make_float2(of.base, total));
        each_sum(r, [&](int at, int line, int i) { sums[r][at] = merger(sums[r][at], tile_sums[line][i]); });
    }
};

}  // namespace tide::cuda
