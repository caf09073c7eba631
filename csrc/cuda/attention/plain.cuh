// Paged attention for everything the tensor-core kernel does not take: float32, loose alignment, old devices.
//
// A warp owns one head of a query and walks its chunk 32 positions at a time: eight threads share a
// score, then every thread keeps one position's weight and a few dims of the sum.
#pragma once

#include "cuda/attention/work.cuh"
#include "cuda/common/convert.cuh"

namespace tide::cuda {

constexpr int kPlainQueryHeads = 4;  // warps of a CTA
constexpr int kPlainThreads = kPlainQueryHeads * 32;
constexpr int kMaxHeadDim = 256;
constexpr int kDimsPerThread = kMaxHeadDim / 32;
constexpr int kDimsPerEighth = kMaxHeadDim / 8;

template <typename T>
__global__ void __launch_bounds__(kPlainThreads) attention_plain(const __grid_constant__ AttentionWork p) {
    __shared__ PieceFinder<kPlainThreads, kPlainQueryHeads> finder;
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int dims = static_cast<int>(p.head_dim), block_size = static_cast<int>(p.block_size);
    const T* keys = static_cast<const T*>(p.k_pool);
    const T* values = static_cast<const T*>(p.v_pool);
    const ScoreScale scale(p);
    let_next_start();
    wait_for_previous();
    const Partials to = partials(p);
    finder.count(p);
    const int total_pieces = finder.total();
    for (int64_t index = blockIdx.x; index < total_pieces; index += gridDim.x) {
        const Piece piece = finder.find(p, static_cast<int>(index));
        if (warp >= piece.num_query_heads) continue;  // the same for the whole warp
        const QueryHead query_head = query_head_of(p, piece, warp);
        if (!query_head.covers(piece.chunk)) continue;
        const int64_t partial = query_head.row(p) * to.chunks + piece.chunk;
        const int begin = chunk_begin(piece.chunk);
        const int end = min(chunk_begin(piece.chunk + 1), query_head.span.high);
        const int32_t* table = p.block_tables + int64_t{piece.row} * p.max_blocks;
        const T* query = static_cast<const T*>(p.q) + int64_t{query_head.token} * p.q_token_stride +
                         query_head.head * p.q_head_stride;
        float q[kDimsPerEighth];
#pragma unroll
        for (int i = 0; i < kDimsPerEighth; ++i) {
            const int dim = i * 8 + thread % 8;
            q[i] = dim < dims ? to_float(query[dim]) : 0.0f;
        }

        float sums[kDimsPerThread] = {}, max_score = kNothing, total = 0.0f;
        for (int first = begin; first < end; first += 32) {
            if (first + 32 <= query_head.span.low) continue;
            const int position = min(first + thread, end - 1);
            const int64_t block = table[position / block_size];
            const int64_t place =
                ((block * p.num_kv_heads + piece.kv_head) * block_size + position % block_size) * p.head_dim;
            float score = kNothing;
            for (int four = 0; four < 8; ++four) {
                const T* key = keys + __shfl_sync(~0u, place, four * 4 + thread / 8);
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < kDimsPerEighth; ++i) {
                    const int dim = i * 8 + thread % 8;
                    if (dim < dims) dot = fmaf(q[i], to_float(key[dim]), dot);
                }
#pragma unroll
                for (int step = 1; step < 8; step *= 2) dot += __shfl_xor_sync(~0u, dot, step);
                const float mine = __shfl_sync(~0u, dot, thread % 4 * 8);
                if (thread / 4 == four) score = scale(mine);
            }
            if (first + thread < query_head.span.low || first + thread >= end) score = kNothing;
            float highest = score;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
            highest = fmaxf(highest, max_score);
            const float shrink = exp2f(max_score - base_of(highest)), weight = exp2f(score - base_of(highest));
            max_score = highest;
            float added = weight;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) added += __shfl_xor_sync(~0u, added, step);
            total = total * shrink + added;
#pragma unroll
            for (float& sum : sums) sum *= shrink;
            for (int s = 0; s < min(32, end - first); ++s) {
                const float w = __shfl_sync(~0u, weight, s);
                const T* value = values + __shfl_sync(~0u, place, s);
#pragma unroll
                for (int i = 0; i < kDimsPerThread; ++i) {
                    if (i * 32 + thread < dims) sums[i] = fmaf(w, to_float(value[i * 32 + thread]), sums[i]);
                }
            }
        }
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int i = 0; i < kDimsPerThread; ++i) {
            const int dim = i * 32 + thread;
            if (dim >= dims) continue;
            if (query_head.is_whole()) {
                static_cast<T*>(p.out)[query_head.row(p) * p.head_dim + dim] = from_float<T>(sums[i] * inverse);
            } else {
                to.sums[partial * p.head_dim + dim] = sums[i];
            }
        }
        if (!query_head.is_whole() && thread == 0) to.stats[partial] = make_float2(max_score, total);
    }
}

template <typename T>
void launch_attention_plain(const PagedAttentionParams& p, cudaStream_t stream) {
    const int64_t resident = current_device("paged_attention").num_sms * tuning::kPlainCtasPerSm;
    launch("paged_attention", attention_plain<T>, {resident, kPlainThreads, 0, 1, Effect::kNone}, stream,
           AttentionWork(p));
}

}  // namespace tide::cuda
