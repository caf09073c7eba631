// Which kernel paged attention gets, and the sum of its chunks. The kernel depends on dtype, head size and alignment,
// never on the rows.
#include "cuda/attention_plain.cuh"
#include "cuda/attention_tiles.h"
#include "cuda/ops.h"
#include "cuda/tensor_core.cuh"

namespace tide::cuda {
namespace {

constexpr int kCombineWarps = 4;
constexpr int kVectorsPerThread = kMaxHeadDim / 128;  // of four floats
constexpr int kChunksAtOnce = 4;                      // loads in flight

// One CTA per row, query head and query: the warps take its chunks in turn, then their sums are added in order.
template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_chunks(const __grid_constant__ PagedAttentionParams p, uint32_t queries_at_once) {
    __shared__ float4 warp_sums[kCombineWarps][kVectorsPerThread][32];
    __shared__ float warp_totals[kCombineWarps];
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t heads = static_cast<uint32_t>(p.num_heads);
    const int64_t row = blockIdx.x / heads / queries_at_once, head = blockIdx.x % heads;
    const int first_turn = static_cast<int>(blockIdx.x / heads % queries_at_once);
    const Partials from = partials(p);
    let_next_start();
    wait_for_previous();
    if (row >= count_rows(p.num_rows, p.rows)) return;
    const int first_query = p.query_starts[row], num_queries = p.query_starts[row + 1] - first_query;
    for (int query = first_turn; query < num_queries; query += static_cast<int>(queries_at_once)) {
        const Span span = span_of(p, p.context_lens[row] - num_queries + query);
        if (span.high <= 0) continue;
        const int first = chunk_of(span.low), last = chunk_of(span.high - 1);
        if (first == last) continue;  // its result is in `out` already
        const int64_t lane = (int64_t{first_query} + query) * p.num_heads + head;
        const float2* stats = from.stats + lane * from.chunks;
        const float* sums = from.sums + lane * from.chunks * p.head_dim + thread * 4;

        float peak = kNothing;
        for (int chunk = first + thread; chunk <= last; chunk += 32) peak = fmaxf(peak, stats[chunk].x);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        const float base = base_of(peak);

        float4 sum[kVectorsPerThread] = {};
        float total = 0.0f;
        for (int begin = first + warp; begin <= last; begin += kCombineWarps * kChunksAtOnce) {
            float4 v[kChunksAtOnce][kVectorsPerThread];
            float2 stat[kChunksAtOnce];
#pragma unroll
            for (int i = 0; i < kChunksAtOnce; ++i) {
                const int chunk = begin + i * kCombineWarps;
                stat[i] = chunk <= last ? stats[chunk] : make_float2(kNothing, 0.0f);
#pragma unroll
                for (int j = 0; j < kVectorsPerThread; ++j) {
                    v[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (chunk <= last && j * 128 + thread * 4 < p.head_dim)
                        v[i][j] = *reinterpret_cast<const float4*>(sums + chunk * p.head_dim + j * 128);
                }
            }
#pragma unroll
            for (int i = 0; i < kChunksAtOnce; ++i) {
                const float factor = exp2_fast(stat[i].x - base);
                total = fmaf(stat[i].y, factor, total);
#pragma unroll
                for (int j = 0; j < kVectorsPerThread; ++j) {
                    sum[j].x = fmaf(v[i][j].x, factor, sum[j].x);
                    sum[j].y = fmaf(v[i][j].y, factor, sum[j].y);
                    sum[j].z = fmaf(v[i][j].z, factor, sum[j].z);
                    sum[j].w = fmaf(v[i][j].w, factor, sum[j].w);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < kVectorsPerThread; ++j) warp_sums[warp][j][thread] = sum[j];
        if (thread == 0) warp_totals[warp] = total;
        __syncthreads();
        const float* all = reinterpret_cast<const float*>(warp_sums);
        for (int dim = threadIdx.x; dim < p.head_dim; dim += kCombineWarps * 32) {
            float value = 0.0f, weight = 0.0f;
#pragma unroll
            for (int w = 0; w < kCombineWarps; ++w) {
                value += all[w * kVectorsPerThread * 128 + dim];
                weight += warp_totals[w];
            }
            static_cast<T*>(p.out)[lane * p.head_dim + dim] = from_float<T>(weight > 0.0f ? value / weight : 0.0f);
        }
        __syncthreads();
    }
}

template <typename T>
void launch_combine(const PagedAttentionParams& p, cudaStream_t stream) {
    constexpr int64_t kMostAtOnce = 16;
    const int64_t queries = p.max_queries < 1 ? 1 : p.max_queries < kMostAtOnce ? p.max_queries : kMostAtOnce;
    launch("paged_attention", combine_chunks<T>, {p.rows * p.num_heads * queries, kCombineWarps * 32}, stream, p,
           static_cast<uint32_t>(queries));
}

bool can_use_tiles(const PagedAttentionParams& p) {
    const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; };
    return current_device("paged_attention").major >= kTensorCoreMajor && p.q_token_stride % kVector == 0 &&
           p.q_head_stride % kVector == 0 && aligned(p.q) && aligned(p.k_pool) && aligned(p.v_pool) && aligned(p.out);
}

bool launched_tiles(DType dtype, const PagedAttentionParams& p, cudaStream_t stream) {
    if (dtype == DType::kFloat32 || !can_use_tiles(p)) return false;
    return dtype == DType::kFloat16 ? launch_attention_tiles<__half>(p, stream)
                                    : launch_attention_tiles<__nv_bfloat16>(p, stream);
}

}  // namespace

size_t paged_attention_workspace(int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t max_context) {
    const int64_t chunks = num_chunks(max_context);
    if (chunks <= 1) return 0;
    return static_cast<size_t>(num_tokens * num_heads * chunks * (head_dim + 2)) * sizeof(float);
}

void paged_attention(DType dtype, const PagedAttentionParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.num_tokens <= 0 || params.max_context <= 0) return;
    if (params.head_dim % kVector != 0 || params.head_dim > kMaxHeadDim)
        throw std::runtime_error("paged_attention: head_dim must be a multiple of 8, at most 256");
    if (params.max_context > INT32_MAX) throw std::runtime_error("paged_attention: max_context is too large");
    if (!launched_tiles(dtype, params, stream)) {
        with_storage("paged_attention", dtype,
                     [&](auto storage) { launch_attention_plain<typename decltype(storage)::Type>(params, stream); });
    }
    if (num_chunks(params.max_context) > 1) {
        with_storage("paged_attention", dtype,
                     [&](auto storage) { launch_combine<typename decltype(storage)::Type>(params, stream); });
    }
}

}  // namespace tide::cuda
