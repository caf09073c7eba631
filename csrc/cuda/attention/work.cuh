// How paged attention is cut into pieces, and how a warp finds the pieces that are its CTA's own.
//
// The context is cut into chunks whose borders depend on the position alone, so a query adds up the same chunks in the
// same order whatever else is in the batch. A piece is one chunk of one row for one kv head and up to kQueryHeads of
// its query heads. A query head is one head of one query: index = query * heads_per_kv + head. A fixed number of CTAs
// walks the list of pieces, which exists only as a sum over the rows: the grid needs no host knowledge of lengths.
#pragma once

#include "cuda/attention/attention.h"
#include "cuda/common/divider.h"
#include "cuda/common/launch.h"
#include "cuda/common/tuning.h"

namespace tide::cuda {

// Chunks of 512 positions up to 32 Ki, then of 1024, so that partial results stay few.
constexpr int kChunk = 512;
constexpr int kLargestChunk = 2 * kChunk;
constexpr int kFirstLong = 32 * 1024;
constexpr int kChunksBeforeLong = kFirstLong / kChunk;

__host__ __device__ inline int chunk_begin(int chunk) {
    if (chunk < kChunksBeforeLong) return chunk * kChunk;
    return kFirstLong + (chunk - kChunksBeforeLong) * kLargestChunk;
}

__host__ __device__ inline int chunk_of(int position) {
    if (position < kFirstLong) return position / kChunk;
    return kChunksBeforeLong + (position - kFirstLong) / kLargestChunk;
}

__host__ __device__ inline int64_t num_chunks(int64_t context) {
    return context > 0 ? chunk_of(static_cast<int>(context - 1)) + 1 : 0;
}

// The workspace: counters of finished chunks, the last of them of pieces that were taken, zero between calls and always
// in the same place; then sums [T, num_heads, chunks, head_dim]; then the largest score and the total of each.
constexpr int64_t kCounters = 64 * 1024;

struct Partials {
    int32_t* counters;
    float* sums;
    float2* stats;  // x: largest score in units of log2(e), y: sum of exp2(score - largest)
    int chunks;
};

__host__ __device__ inline Partials partials(const PagedAttentionParams& p) {
    const int64_t chunks = num_chunks(p.max_context);
    int32_t* counters = static_cast<int32_t*>(p.workspace);
    float* sums = reinterpret_cast<float*>(counters + kCounters);
    return {counters, sums, reinterpret_cast<float2*>(sums + p.num_tokens * p.num_heads * chunks * p.head_dim),
            static_cast<int>(chunks)};
}

// Rows of a head in a pool. Kernels count them in 32 bits.
inline int64_t pool_rows(const PagedAttentionParams& p) {
    return p.num_blocks * p.num_kv_heads * p.block_size;
}

// The params, and what the host makes of them for the kernels. Counts of heads and positions are 32 bits wide.
struct AttentionWork : PagedAttentionParams {
    int heads_per_kv, kv_heads, page_units;  // query heads of a kv head; kv heads; 8 positions each, of a page
    int visible;                             // the most positions a query covers
    Divider by_heads_per_kv, by_kv_heads, by_page_units;
    bool counted = false;  // chunks are counted, and the CTA that stores the last one adds them up

    explicit AttentionWork(const PagedAttentionParams& p)
        : PagedAttentionParams(p),
          heads_per_kv(static_cast<int>(p.num_heads / p.num_kv_heads)),
          kv_heads(static_cast<int>(p.num_kv_heads)),
          page_units(static_cast<int>(p.block_size / kPageUnit)),
          visible(p.window > 0 && p.window < INT32_MAX ? static_cast<int>(p.window) : INT32_MAX),
          by_heads_per_kv(heads_per_kv),
          by_kv_heads(kv_heads),
          by_page_units(page_units) {}

    static constexpr int kPageUnit = 8;
};

// Positions [low, high) that a query at `position` covers.
struct Span {
    int low, high;
};

__host__ __device__ inline Span span_of(const AttentionWork& p, int position) {
    const int low = position + 1 - p.visible;
    return {low > 0 ? low : 0, position + 1};
}

// One row: its queries are the last of `length` positions and accumulate chunks first_chunk to last_chunk.
struct RowWork {
    int first_query, num_queries, length;
    int first_chunk, last_chunk, query_heads;  // query heads of one kv head

    __device__ RowWork(const AttentionWork& p, int first_query, int num_queries, int length)
        : first_query(first_query),
          num_queries(num_queries),
          length(length),
          query_heads(num_queries * p.heads_per_kv) {
        first_chunk = chunk_of(span_of(p, max(length - num_queries, 0)).low);
        last_chunk = chunk_of(max(length - 1, 0));
    }
    template <int kQueryHeads>
    __device__ int num_head_blocks() const {
        return (query_heads + kQueryHeads - 1) / kQueryHeads;
    }
    template <int kQueryHeads>
    __device__ int num_pieces(const AttentionWork& p) const {
        if (num_queries <= 0 || length <= 0) return 0;
        return (last_chunk - first_chunk + 1) * num_head_blocks<kQueryHeads>() * p.kv_heads;
    }
};

struct Piece {
    int row, first_query, num_queries, length;
    int kv_head, chunk, first_query_head, num_query_heads;
    int num_chunks;  // that the queries of the row accumulate, all together

    __device__ int begin() const { return chunk_begin(chunk); }
    __device__ int end() const { return min(chunk_begin(chunk + 1), length); }
    // Queries past the last one count on: nothing of theirs is kept.
    __device__ int position_of(int query) const { return length - num_queries + query; }
};

// Reads what rows are; past the first-level cache before wait_for_previous().
struct IndexReader {
    bool early = false;

    __device__ int operator()(const int32_t* from) const { return early ? __ldcg(from) : *from; }
    __device__ int64_t operator()(const int64_t* from) const {
        return early ? __ldcg(reinterpret_cast<const long long*>(from)) : *from;
    }
};

__device__ inline RowWork read_row(const AttentionWork& p, int row, const IndexReader& read = {}) {
    const int first_query = read(p.query_starts + row);
    return {p, first_query, read(p.query_starts + row + 1) - first_query, read(p.context_lens + row)};
}

// The piece of a row that `rest` others of it come before.
template <int kQueryHeads>
__device__ inline Piece piece_of(const AttentionWork& p, const RowWork& work, int row, int rest) {
    const int blocks = work.template num_head_blocks<kQueryHeads>();
    const int head_and_chunk = blocks == 1 ? rest : rest / blocks;
    const int first_query_head = (rest - head_and_chunk * blocks) * kQueryHeads;
    const int chunk = p.by_kv_heads(head_and_chunk);
    return {row,
            work.first_query,
            work.num_queries,
            work.length,
            head_and_chunk - chunk * p.kv_heads,
            work.first_chunk + chunk,
            first_query_head,
            min(kQueryHeads, work.query_heads - first_query_head),
            work.last_chunk - work.first_chunk + 1};
}

// Thread i counts the pieces of the i-th share of neighbouring rows. All of it lies in shared memory: the kernels need
// their registers for sums. There are less than 2^31 pieces, for each is a page of memory or more.
template <int kThreads, int kQueryHeads>
struct PieceFinder {
    alignas(16) int warp_totals[kThreads / 32];  // read several at once, and nothing else with them
    int begins[kThreads + 1];                    // pieces of the shares before, and of all
    int first_rows[kThreads][3];                 // of each share: first query, queries, length

    // All threads of the CTA call it, after wait_for_previous(). Ends with a barrier.
    __device__ void count(const AttentionWork& p) {
        const int rows = static_cast<int>(p.rows), share = rows_per_thread(p);
        const int first_row = share * threadIdx.x, last_row = min(first_row + share, rows);
        int upto = 0;
        for (int row = first_row; row < last_row; ++row) {
            const RowWork work = read_row(p, row);
            upto += work.template num_pieces<kQueryHeads>(p);
            if (row > first_row) continue;
            first_rows[threadIdx.x][0] = work.first_query;
            first_rows[threadIdx.x][1] = work.num_queries;
            first_rows[threadIdx.x][2] = work.length;
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += other;
        }
        if (lane == 31) warp_totals[warp] = upto;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kThreads / 32; ++w) upto += w < warp ? warp_totals[w] : 0;
        begins[threadIdx.x + 1] = upto;
        if (threadIdx.x == 0) begins[0] = 0;
        __syncthreads();
    }

    __device__ int total() const { return begins[kThreads]; }

    // All lanes of a warp call it and get the same piece. `index` is below total().
    __device__ Piece find(const AttentionWork& p, int index) const {
        const int lane = threadIdx.x % 32;
        int share = 0;  // as many as end at or before the piece
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) share += __popc(__ballot_sync(~0u, begins[i * 32 + lane + 1] <= index));
        int row = rows_per_thread(p) * share, rest = index - begins[share];
        const int* first = first_rows[share];
        RowWork work(p, first[0], first[1], first[2]);
        for (int pieces; rest >= (pieces = work.template num_pieces<kQueryHeads>(p)); rest -= pieces)
            work = read_row(p, ++row);
        return piece_of<kQueryHeads>(p, work, row, rest);
    }

    __device__ static int rows_per_thread(const AttentionWork& p) {
        return (static_cast<int>(p.rows) + kThreads - 1) / kThreads;
    }
};

// How often the query heads of a row are divided, where a piece has up to `query heads`.
inline int64_t query_head_blocks(const AttentionWork& p, int query_heads) {
    const int64_t blocks = (p.max_queries * p.heads_per_kv + query_heads - 1) / query_heads;
    return blocks < 1 ? 1 : blocks;
}

// The most pieces that there may be; more are right but slow.
inline int64_t most_pieces(const AttentionWork& p, int query_heads) {
    const int64_t by_row = p.rows * query_head_blocks(p, query_heads),
                  by_token = p.rows + p.num_tokens * p.heads_per_kv / query_heads;
    return (by_row < by_token ? by_row : by_token) * p.num_kv_heads * num_chunks(p.max_context);
}

// One head of one query: the positions it sees and the chunks they lie in. If it sees one chunk only, its result is
// complete at once; else it stores a partial one.
struct QueryHead {
    int token, head;
    Span span;
    int first_chunk, last_chunk;

    __device__ bool covers(int chunk) const { return first_chunk <= chunk && chunk <= last_chunk; }
    __device__ bool is_whole() const { return first_chunk == last_chunk; }
    __device__ int64_t row(const AttentionWork& p) const { return int64_t{token} * p.num_heads + head; }
};

// `lane` is below piece.num_query heads.
__device__ inline QueryHead query_head_of(const AttentionWork& p, const Piece& piece, int lane) {
    const int index = piece.first_query_head + lane, query = p.by_heads_per_kv(index);
    const Span span = span_of(p, piece.position_of(query));
    return {piece.first_query + query, piece.kv_head * p.heads_per_kv + index - query * p.heads_per_kv, span,
            chunk_of(span.low), chunk_of(max(span.high - 1, 0))};
}

__device__ inline float exp2_fast(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Scores in units of log2(e), ready for exp2.
struct ScoreScale {
    float scale, cap;

    __host__ __device__ explicit ScoreScale(const AttentionWork& p) {
        constexpr float kLog2E = 1.4426950408889634f;
        cap = p.softcap > 0.0f ? p.softcap * kLog2E : 0.0f;
        scale = p.softcap > 0.0f ? p.scaling / p.softcap : p.scaling * kLog2E;
    }
    __device__ float operator()(float dot) const {
        const float scaled = dot * scale;
        return cap > 0.0f ? cap * tanhf(scaled) : scaled;
    }
    // The same within a few 1e-7 of the cap, with little code: for the inner loop of half-width types.
    __device__ float quick(float dot) const {
        const float scaled = dot * scale;
        return cap > 0.0f ? quick_cap(scaled) : scaled;
    }
    __device__ float quick_cap(float scaled) const {
        constexpr float kTwoLog2E = 2.8853900817779268f;
        return cap - __fdividef(2.0f * cap, exp2_fast(scaled * kTwoLog2E) + 1.0f);
    }
};

constexpr float kNothing = -INFINITY;  // the largest score of no scores

// What to subtract from scores whose largest is `max_score`.
__device__ inline float base_of(float max_score) {
    return max_score == kNothing ? 0.0f : max_score;
}

// How a warp finds pieces by itself: lane i knows the i-th share of neighbouring rows. No barrier, no shared memory.

template <int kQueryHeads>
class WarpFinder {
  public:
    // All lanes of the warp, when what rows are is written.
    __device__ explicit WarpFinder(const AttentionWork& p, const IndexReader& read = {})
        : share_(static_cast<int>((p.rows + 31) / 32)), first_(0), queries_(0), length_(0), upto_(0) {
        const int lane = threadIdx.x % 32, rows = static_cast<int>(p.rows);
        int mine = 0;
        for (int row = share_ * lane; row < min(share_ * (lane + 1), rows); ++row) {
            const RowWork work = read_row(p, row, read);
            mine += work.num_pieces<kQueryHeads>(p);
            if (row > share_ * lane) continue;
            first_ = work.first_query;
            queries_ = work.num_queries;
            length_ = work.length;
        }
        upto_ = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, upto_, step);
            if (lane >= step) upto_ += other;
        }
        total_ = __shfl_sync(~0u, upto_, 31);
        before_ = upto_ - mine;
    }

    // The same as another one that was saved: it need not stay in registers.
    static constexpr int kSaved = 5 * 32;
    __device__ WarpFinder(const AttentionWork& p, const int* saved)
        : share_(static_cast<int>((p.rows + 31) / 32)),
          first_(saved[threadIdx.x % 32]),
          queries_(saved[32 + threadIdx.x % 32]),
          length_(saved[64 + threadIdx.x % 32]),
          before_(saved[96 + threadIdx.x % 32]),
          upto_(saved[128 + threadIdx.x % 32]),
          total_(saved[128 + 31]) {}
    __device__ void save(int* to) const {
        int i = threadIdx.x % 32;
        for (const int value : {first_, queries_, length_, before_, upto_}) {
            to[i] = value;
            i += 32;
        }
    }

    __device__ int total() const { return total_; }

    // All lanes of the warp get the same piece. `index` is below total().
    __device__ Piece find(const AttentionWork& p, int index, const IndexReader& read = {}) const {
        const int share = __popc(__ballot_sync(~0u, upto_ <= index));
        int row = share_ * share, rest = index - __shfl_sync(~0u, before_, share);
        RowWork work(p, __shfl_sync(~0u, first_, share), __shfl_sync(~0u, queries_, share),
                     __shfl_sync(~0u, length_, share));
        for (int pieces; rest >= (pieces = work.num_pieces<kQueryHeads>(p)); rest -= pieces)
            work = read_row(p, ++row, read);
        return piece_of<kQueryHeads>(p, work, row, rest);
    }

  private:
    int share_;                     // rows of a lane
    int first_, queries_, length_;  // of the first of them
    int before_, upto_, total_;     // pieces: of the shares before, with this one, of all
};

}  // namespace tide::cuda
