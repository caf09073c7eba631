// How paged attention is cut into pieces, and how a CTA finds the pieces that are its own.
//
// The context is cut into chunks whose borders depend on the position alone, so a query adds up the same chunks in the
// same order whatever else is in the batch. A piece is one chunk of one row for one kv head and up to kLanes of its
// lanes; a lane is one query head of one query, lane = query * group + head within the group. A fixed number of CTAs
// walks the list of pieces, which exists only as a sum over the rows: the grid needs no host knowledge of lengths.
#pragma once

#include "cuda/launch.h"
#include "cuda/params.h"

namespace tide::cuda {

// Chunks of 512 positions up to 32 Ki, of 1024 up to 64 Ki, then of 2048, so that partial results stay few.
constexpr int kChunk = 512;
constexpr int kLargestChunk = 4 * kChunk;
constexpr int kFirstLong = 32 * 1024, kFirstLonger = 64 * 1024;
constexpr int kChunksBeforeLong = kFirstLong / kChunk;
constexpr int kChunksBeforeLonger = kChunksBeforeLong + (kFirstLonger - kFirstLong) / (2 * kChunk);

__host__ __device__ inline int chunk_begin(int chunk) {
    if (chunk < kChunksBeforeLong) return chunk * kChunk;
    if (chunk < kChunksBeforeLonger) return kFirstLong + (chunk - kChunksBeforeLong) * (2 * kChunk);
    return kFirstLonger + (chunk - kChunksBeforeLonger) * kLargestChunk;
}

__host__ __device__ inline int chunk_of(int position) {
    if (position < kFirstLong) return position / kChunk;
    if (position < kFirstLonger) return kChunksBeforeLong + (position - kFirstLong) / (2 * kChunk);
    return kChunksBeforeLonger + (position - kFirstLonger) / kLargestChunk;
}

__host__ __device__ inline int64_t num_chunks(int64_t context) {
    return context > 0 ? chunk_of(static_cast<int>(context - 1)) + 1 : 0;
}

// The workspace: sums [T, num_heads, chunks, head_dim], then the largest score and the total of each.
struct Partials {
    float* sums;
    float2* stats;  // x: largest score in units of log2(e), y: sum of exp2(score - largest)
    int64_t chunks;
};

__host__ __device__ inline Partials partials(const PagedAttentionParams& p) {
    const int64_t chunks = num_chunks(p.max_context);
    float* sums = static_cast<float*>(p.workspace);
    return {sums, reinterpret_cast<float2*>(sums + p.num_tokens * p.num_heads * chunks * p.head_dim), chunks};
}

// Positions [low, high) that a query at `position` sees.
struct Span {
    int low, high;
};

__device__ inline Span span_of(const PagedAttentionParams& p, int position) {
    const int64_t low = p.window > 0 ? int64_t{position} - p.window + 1 : 0;
    return {low > 0 ? static_cast<int>(low) : 0, position + 1};
}

// One row: its queries are the last of `length` positions and see chunks first_chunk to last_chunk.
struct RowWork {
    int first_query, num_queries, length, first_chunk, last_chunk, num_groups;

    __device__ int64_t num_pieces(int64_t num_kv_heads) const {
        return num_queries > 0 && length > 0 ? (last_chunk - first_chunk + 1) * num_groups * num_kv_heads : 0;
    }
};

template <int kLanes>
__device__ inline RowWork row_work(const PagedAttentionParams& p, int64_t row) {
    RowWork w;
    w.first_query = p.query_starts[row];
    w.num_queries = p.query_starts[row + 1] - w.first_query;
    w.length = p.context_lens[row];
    const int64_t lanes = w.num_queries * (p.num_heads / p.num_kv_heads);
    w.num_groups = static_cast<int>((lanes + kLanes - 1) / kLanes);
    w.first_chunk = chunk_of(span_of(p, max(w.length - w.num_queries, 0)).low);
    w.last_chunk = chunk_of(max(w.length - 1, 0));
    return w;
}

struct Piece {
    RowWork row;
    int64_t row_index;
    int kv_head, chunk, first_lane;
};

// Thread i counts the pieces of the i-th share of neighbouring rows; whoever has the piece wanted tells the others.
// All of it lies in shared memory: the kernels need their registers for sums.
template <int kThreads, int kLanes>
struct PieceFinder {
    int64_t begins[kThreads + 1];  // pieces of the shares before, and of all
    int64_t warp_totals[kThreads / 32];
    Piece found;

    // All threads of the CTA call these; count() comes first, after wait_for_previous(). Both end with a barrier.
    __device__ void count(const PagedAttentionParams& p) {
        const int64_t rows = count_rows(p.num_rows, p.rows), share = rows_per_thread(rows);
        const int64_t first_row = share * threadIdx.x, last_row = min(first_row + share, rows);
        int64_t mine = 0;
        for (int64_t row = first_row; row < last_row; ++row)
            mine += row_work<kLanes>(p, row).num_pieces(p.num_kv_heads);
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t upto = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += other;
        }
        if (lane == 31) warp_totals[warp] = upto;
        __syncthreads();
        for (int w = 0; w < warp; ++w) upto += warp_totals[w];
        begins[threadIdx.x + 1] = upto;
        if (threadIdx.x == 0) begins[0] = 0;
        __syncthreads();
    }

    __device__ int64_t total() const { return begins[kThreads]; }

    // `index` is below total(). Sync before the next call: it overwrites the piece.
    __device__ const Piece& find(const PagedAttentionParams& p, int64_t index) {
        if (begins[threadIdx.x] <= index && index < begins[threadIdx.x + 1]) {
            int64_t rest = index - begins[threadIdx.x];
            for (int64_t row = rows_per_thread(count_rows(p.num_rows, p.rows)) * threadIdx.x;; ++row) {
                const RowWork work = row_work<kLanes>(p, row);
                const int64_t pieces = work.num_pieces(p.num_kv_heads);
                if (rest < pieces) {
                    const int in_row = static_cast<int>(rest), heads = static_cast<int>(p.num_kv_heads);
                    found = {work, row, in_row / work.num_groups % heads,
                             work.first_chunk + in_row / work.num_groups / heads, in_row % work.num_groups * kLanes};
                    break;
                }
                rest -= pieces;
            }
        }
        __syncthreads();
        return found;
    }

    __device__ static int64_t rows_per_thread(int64_t rows) { return (rows + kThreads - 1) / kThreads; }
};

// A lane of a piece: where its result goes.
struct Lane {
    bool exists;
    int64_t token;
    int64_t head;
    Span span;
};

__device__ inline Lane lane_of(const PagedAttentionParams& p, const Piece& piece, int lane) {
    const int group = static_cast<int>(p.num_heads / p.num_kv_heads);
    const int index = piece.first_lane + lane, query = index / group;
    const int position = piece.row.length - piece.row.num_queries + query;
    return {query < piece.row.num_queries, int64_t{piece.row.first_query} + query,
            int64_t{piece.kv_head} * group + index % group, span_of(p, position)};
}

// A lane that sees one chunk only has its result at once; the others leave a partial one. Where this chunk's goes:
struct Target {
    bool needed;  // the lane exists and sees some of the chunk
    bool whole;   // into `out`
    int64_t out;  // element offset
    int64_t partial;
};

__device__ inline Target target_of(const PagedAttentionParams& p, const Lane& lane, int chunk, int64_t chunks) {
    const int first = chunk_of(lane.span.low), last = chunk_of(max(lane.span.high - 1, 0));
    const int64_t row = lane.token * p.num_heads + lane.head;
    return {lane.exists && first <= chunk && chunk <= last, first == last, row * p.head_dim, row * chunks + chunk};
}

__device__ inline float exp2_fast(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Scores in units of log2(e), ready for exp2.
struct ScoreScale {
    float scale, cap;

    __device__ explicit ScoreScale(const PagedAttentionParams& p) {
        constexpr float kLog2E = 1.4426950408889634f;
        cap = p.softcap > 0.0f ? p.softcap * kLog2E : 0.0f;
        scale = p.softcap > 0.0f ? p.scaling / p.softcap : p.scaling * kLog2E;
    }
    __device__ float operator()(float dot) const {
        const float scaled = dot * scale;
        return cap > 0.0f ? cap * tanhf(scaled) : scaled;
    }
};

constexpr float kNothing = -INFINITY;  // the largest score of no scores

// What to subtract from scores whose largest is `peak`.
__device__ inline float base_of(float peak) {
    return peak == kNothing ? 0.0f : peak;
}

}  // namespace tide::cuda
