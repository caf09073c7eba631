// How the partial results of one query head become one: those of the warps of a piece, then those of the chunks.
#pragma once

#include "cuda/attention/work.cuh"
#include "cuda/common/convert.cuh"

namespace tide::cuda {

// How the chunks of a query head become its result: in order, eight at a time, in every kernel.

// Four dims of a query head whose partial results are row `row` of the workspace. What other CTAs of the same kernel
// wrote is read past the first-level cache.
__device__ inline float4 combine_chunks(const PagedAttentionParams& p, const Partials& from, int64_t row, int first,
                                        int last, int dim) {
    constexpr int kChunksAtOnce = 8;  // loads in flight
    const float2* stats = from.stats + row * from.chunks;
    const float* sums = from.sums + row * from.chunks * p.head_dim + dim;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float max_score = kNothing, total = 0.0f;
    for (int begin = first; begin <= last; begin += kChunksAtOnce) {
        float2 stat[kChunksAtOnce];
        float4 v[kChunksAtOnce];
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) {
            stat[i] = make_float2(kNothing, 0.0f);
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (begin + i <= last) {
                stat[i] = __ldcg(stats + begin + i);
                v[i] = __ldcg(reinterpret_cast<const float4*>(sums + (begin + i) * p.head_dim));
            }
        }
        float highest = max_score;
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) highest = fmaxf(highest, stat[i].x);
        const float base = base_of(highest), shrink = exp2_fast(max_score - base);
        max_score = highest;
        total *= shrink;
        sum = make_float4(sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink);
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) {
            const float factor = exp2_fast(stat[i].x - base);
            total = fmaf(stat[i].y, factor, total);
            sum.x = fmaf(v[i].x, factor, sum.x);
            sum.y = fmaf(v[i].y, factor, sum.y);
            sum.z = fmaf(v[i].z, factor, sum.z);
            sum.w = fmaf(v[i].w, factor, sum.w);
        }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    return make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
}

template <typename T>
__device__ inline void store_four(T* to, const float4& v) {
    struct alignas(4 * sizeof(T)) Vector {
        T v[4];
    };
    *reinterpret_cast<Vector*>(to) = {from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z), from_float<T>(v.w)};
}

// How the results of a piece's warps become one, where it goes, and who adds up the chunks of some query heads.

// Results of one query head that become one: first those of the even warps in order, then those of the odd ones, then
// both. Every kernel adds them up with these, however many at a time.
struct Merger {
    float max_score = kNothing, total = 0.0f;
    float kept = 0.0f, added = 0.0f;  // what to multiply the sum so far and the next one with

    __device__ void add(const float2& stat) {
        const float highest = fmaxf(max_score, stat.x), base = base_of(highest);
        kept = exp2_fast(max_score - base);
        added = exp2_fast(stat.x - base);
        max_score = highest;
        total = (*this)(total, stat.y);
    }
    __device__ float operator()(float sum, float next) const { return fmaf(next, added, __fmul_rn(sum, kept)); }
    __device__ float4 operator()(const float4& sum, const float4& next) const {
        return make_float4((*this)(sum.x, next.x), (*this)(sum.y, next.y), (*this)(sum.z, next.z),
                           (*this)(sum.w, next.w));
    }
};

// Adds the warps' results and stores them: whole ones to `out`, others to the workspace. These are up to kRows query
// heads of the piece from `first_query_head` on; sum_of(warp, row, dim) has four dims of a warp's sum.
template <typename T, int kDim, int kThreads, int kWarps, int kRows, typename SumOf>
__device__ inline void store_query_heads(const AttentionWork& p, const Piece& piece, int first_query_head,
                                         const float2 (*stats)[kRows], SumOf&& sum_of) {
    constexpr int kVectors = kDim / 4;
    const int num_query_heads = min(piece.num_query_heads - first_query_head, kRows);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_query_heads * kVectors; i += kThreads) {
        const int row = i / kVectors, dim = i % kVectors * 4;
        const QueryHead query_head = query_head_of(p, piece, first_query_head + row);
        if (!query_head.covers(piece.chunk) || dim >= p.head_dim) continue;
        Merger halves[2];
        float4 sums[2] = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            halves[w % 2].add(stats[w][row]);
            sums[w % 2] = halves[w % 2](sums[w % 2], sum_of(w, row, dim));
        }
        Merger both = halves[0];
        both.add(make_float2(halves[1].max_score, halves[1].total));
        const float4 sum = both(sums[0], sums[1]);
        const float max_score = both.max_score, total = both.total;
        if (query_head.is_whole()) {
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            store_four(static_cast<T*>(p.out) + query_head.row(p) * p.head_dim + dim,
                       make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse));
        } else {
            const Partials to = partials(p);
            const int64_t partial = query_head.row(p) * to.chunks + piece.chunk;
            *reinterpret_cast<float4*>(to.sums + partial * p.head_dim + dim) = sum;
            if (dim == 0) to.stats[partial] = make_float2(max_score, total);
        }
    }
}

// Counts a piece that all threads have stored and fenced. True: it was the last of its query heads.
__device__ inline bool count_piece(const AttentionWork& p, const Piece& piece) {
    const int64_t first_query_head = int64_t{piece.first_query} * p.heads_per_kv + piece.first_query_head;
    int32_t* counter = partials(p).counters + first_query_head * p.kv_heads + piece.kv_head;
    const bool is_last = atomicAdd(counter, 1) == piece.num_chunks - 1;
    if (is_last) *counter = 0;  // for the next call
    return is_last;
}

template <typename T, int kDim, int kThreads>
__device__ inline void combine_piece(const AttentionWork& p, const Piece& piece) {
    constexpr int kVectors = kDim / 4;
    __threadfence();
    const Partials from = partials(p);
#pragma unroll 1
    for (int i = threadIdx.x; i < piece.num_query_heads * kVectors; i += kThreads) {
        const QueryHead query_head = query_head_of(p, piece, i / kVectors);
        const int dim = i % kVectors * 4;
        if (query_head.is_whole() || dim >= p.head_dim) continue;
        store_four(static_cast<T*>(p.out) + query_head.row(p) * p.head_dim + dim,
                   combine_chunks(p, from, query_head.row(p), query_head.first_chunk, query_head.last_chunk, dim));
    }
}

}  // namespace tide::cuda
