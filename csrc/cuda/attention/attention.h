// Attention over a paged KV cache.
//
// Pointers are raw and on the device, counts and strides are in elements. The op enqueues its kernels on `stream` and
// returns: nothing is allocated, nothing waits for the device, and all of it can be captured in a graph. A launch that
// fails throws std::runtime_error naming the op.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/small/ops.h"
#include "dtype.h"

namespace tide::cuda {

// Causal attention of ragged queries over paged keys and values. Row r owns the queries query_starts[r] to
// query_starts[r + 1], the last of its context_lens[r] positions. Nothing at or past context_lens[r] is used.
struct PagedAttentionParams {
    const void* q;                // [T, num_heads, head_dim], strides below, last dim contiguous
    const void* k_pool;           // [num_blocks, num_kv_heads, block_size, head_dim], contiguous
    const void* v_pool;           // the same shape
    const int32_t* block_tables;  // [rows, max_blocks]
    const int32_t* query_starts;  // [rows + 1]
    const int32_t* context_lens;  // [rows]
    void* out;                    // [T, num_heads, head_dim], contiguous
    void* workspace;  // paged_attention_workspace(...) bytes, 16-byte aligned, cleared once (accumulate ops.h)
    int64_t rows;
    int64_t num_tokens;   // T: query_starts[rows] is at most this
    int64_t max_queries;  // the most queries a row has; more are right but slow
    int64_t max_context;  // no context_lens[r] is larger
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;  // a multiple of 8
    int64_t max_blocks;
    int64_t num_blocks;  // of a pool, which has less than 2^31 rows of a head
    int64_t q_token_stride;
    int64_t q_head_stride;
    float scaling;
    int64_t window;        // <= 0: none
    float softcap;         // <= 0: none
    bool queries_are_new;  // the launch before it wrote K and V of these queries, and no other pages
};

// head_dim: a multiple of 8 up to 256. Half-width types need q, its strides and the pools to be 16-byte aligned for
// the fast path.
void paged_attention(DType dtype, const PagedAttentionParams& params, cudaStream_t stream);

// rotary_write, then paged_attention of its queries, with the same bits, in one launch. `rotary` has no q_out; a token
// that no row owns is neither read nor written. Half-width types, and what supports_joined() supports; else it throws.
void attend_joined(DType dtype, const PagedAttentionParams& params, const RotaryWriteParams& rotary,
                   cudaStream_t stream);

// Whether the current device streams such pages: heads of 64 or 128, blocks of whole 16 positions, compute capability 9
// or above and the shared memory for it. Never depends on the rows.
bool supports_joined(int64_t head_dim, int64_t block_size);

// Bytes of workspace that serve any call with at most these counts. Its first 256 KiB are counters of the calls: the
// caller clears them once, before the first call; every call leaves them cleared. Calls that share it must not overlap.
size_t paged_attention_workspace(int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t max_context);

}  // namespace tide::cuda
