// Which kernel paged attention gets, and the sum of its chunks. The kernel depends on dtype, head size and alignment,
// never on the rows.
#include "cuda/attention/attention.h"
#include "cuda/attention/kernels.h"
#include "cuda/attention/plain.cuh"
#include "cuda/attention/store.cuh"
#include "cuda/common/ptx/tensor_core.cuh"

namespace tide::cuda {
namespace {

constexpr int kCombineWarps = 4;

// A warp per row, query head and query.
template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_chunks_kernel(const __grid_constant__ AttentionWork p, uint32_t queries_at_once) {
    const int64_t index = int64_t{blockIdx.x} * kCombineWarps + threadIdx.x / 32;
    const int64_t turn = index / p.num_heads, row = turn / queries_at_once;
    const Partials from = partials(p);
    let_next_start();
    wait_for_previous();
    if (row >= p.rows) return;
    const int first_query = p.query_starts[row], num_queries = p.query_starts[row + 1] - first_query;
    for (int query = static_cast<int>(turn % queries_at_once); query < num_queries;
         query += static_cast<int>(queries_at_once)) {
        const Span span = span_of(p, p.context_lens[row] - num_queries + query);
        if (span.high <= 0) continue;
        const int first = chunk_of(span.low), last = chunk_of(span.high - 1);
        if (first == last) continue;  // its result is in `out` already
        const int64_t lane = (int64_t{first_query} + query) * p.num_heads + index % p.num_heads;
        for (int dim = threadIdx.x % 32 * 4; dim < p.head_dim; dim += 128)
            store_four(static_cast<T*>(p.out) + lane * p.head_dim + dim,
                       combine_chunks(p, from, lane, first, last, dim));
    }
}

template <typename T>
void launch_combine(const PagedAttentionParams& p, cudaStream_t stream) {
    const int64_t queries = p.max_queries < 1                              ? 1
                            : p.max_queries < tuning::kMostCombinedQueries ? p.max_queries
                                                                           : tuning::kMostCombinedQueries;
    const int64_t ctas = (p.rows * p.num_heads * queries + kCombineWarps - 1) / kCombineWarps;
    launch("paged_attention", combine_chunks_kernel<T>, {ctas, kCombineWarps * 32, 0, 1, Effect::kNone}, stream,
           AttentionWork(p), static_cast<uint32_t>(queries));
}

bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

bool can_use_tiles(const PagedAttentionParams& p) {
    return current_device("paged_attention").arch >= kTensorCoreArch && p.q_token_stride % kVector == 0 &&
           p.q_head_stride % kVector == 0 && is_aligned(p.q) && is_aligned(p.k_pool) && is_aligned(p.v_pool) &&
           is_aligned(p.out);
}

// Whether the wide kernels run here and should be faster: where few query heads a piece would make more pieces than
// there are multiprocessors. Bits are the same.
bool is_wide(const PagedAttentionParams& p, const RotaryWriteParams* rotary) {
    const DeviceInfo device = current_device("paged_attention");
    const AttentionWork work(p);
    return device.sm90a && rotary == nullptr && p.max_context <= kFirstLong &&
           p.max_queries * work.heads_per_kv > tuning::kNarrowQueryHeads &&
           most_pieces(work, tuning::kNarrowQueryHeads) > device.num_sms;
}

void launch_stream(DType dtype, const PagedAttentionParams& p, const RotaryWriteParams* rotary, bool& combined,
                   cudaStream_t stream) {
    if (is_wide(p, rotary)) {
        if (dtype == DType::kFloat16) return launch_attention_wide<__half>(p, combined, stream);
        return launch_attention_wide<__nv_bfloat16>(p, combined, stream);
    }
    if (dtype == DType::kFloat16) return launch_attention_stream<__half>(p, rotary, combined, stream);
    launch_attention_stream<__nv_bfloat16>(p, rotary, combined, stream);
}

bool launched_tiles(DType dtype, const PagedAttentionParams& p, bool& combined, cudaStream_t stream) {
    if (dtype == DType::kFloat32 || !can_use_tiles(p)) return false;
    if (supports_joined(p.head_dim, p.block_size)) {
        launch_stream(dtype, p, nullptr, combined, stream);
        return true;
    }
    return dtype == DType::kFloat16 ? launch_attention_tiles<__half>(p, combined, stream)
                                    : launch_attention_tiles<__nv_bfloat16>(p, combined, stream);
}

void combine_if_needed(DType dtype, const PagedAttentionParams& p, bool combined, cudaStream_t stream) {
    if (combined || num_chunks(p.max_context) <= 1) return;
    with_storage("paged_attention", dtype,
                 [&](auto storage) { launch_combine<typename decltype(storage)::Type>(p, stream); });
}

// Kernels count positions and rows of a pool in 32 bits.
void check_sizes(const char* op, const PagedAttentionParams& p) {
    if (p.max_context > INT32_MAX) throw std::runtime_error(std::string(op) + ": max_context is too large");
    if (pool_rows(p) <= 0 || pool_rows(p) > INT32_MAX)
        throw std::runtime_error(std::string(op) + ": a pool has 1 to 2^31 - 1 rows of a head");
}

}  // namespace

bool supports_joined(int64_t head_dim, int64_t block_size) {
    const DeviceInfo device = current_device("attend_joined");
    return (head_dim == 64 || head_dim == 128) && block_size > 0 && block_size % 16 == 0 &&
           device.arch >= kClusterArch && device.shared_bytes >= kStreamShared;
}

size_t paged_attention_workspace(int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t max_context) {
    const int64_t chunks = num_chunks(max_context);
    const int64_t partial = chunks > 1 ? num_tokens * num_heads * chunks * (head_dim + 2) : 0;
    return static_cast<size_t>(kCounters + partial) * sizeof(float);
}

void paged_attention(DType dtype, const PagedAttentionParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.num_tokens <= 0 || params.max_context <= 0) return;
    check_sizes("paged_attention", params);
    if (params.head_dim % kVector != 0 || params.head_dim > kMaxHeadDim)
        throw std::runtime_error("paged_attention: head_dim must be a multiple of 8, at most 256");
    if (params.block_size <= 0 || params.block_size % AttentionWork::kPageUnit != 0)
        throw std::runtime_error("paged_attention: block_size must be a multiple of 8");
    bool combined = false;
    if (!launched_tiles(dtype, params, combined, stream)) {
        with_storage("paged_attention", dtype,
                     [&](auto storage) { launch_attention_plain<typename decltype(storage)::Type>(params, stream); });
    }
    combine_if_needed(dtype, params, combined, stream);
}

void attend_joined(DType dtype, const PagedAttentionParams& params, const RotaryWriteParams& rotary,
                   cudaStream_t stream) {
    if (params.rows <= 0 || params.num_tokens <= 0 || params.max_context <= 0) return;
    check_sizes("attend_joined", params);
    if (dtype == DType::kFloat32 || !supports_joined(params.head_dim, params.block_size) ||
        !is_aligned(params.k_pool) || !is_aligned(params.v_pool) || !is_aligned(params.out))
        throw std::runtime_error(
            "attend_joined: needs half-width heads of 64 or 128, blocks of whole 16 positions and compute capability "
            "9");
    if (rotary.cos == nullptr || rotary.sin == nullptr) throw std::runtime_error("attend_joined: needs cos and sin");
    if (params.max_queries > kMostJoinedQueries) throw std::runtime_error("attend_joined: max_queries is at most 8");
    bool combined = false;
    launch_stream(dtype, params, &rotary, combined, stream);
    combine_if_needed(dtype, params, combined, stream);
}

}  // namespace tide::cuda
