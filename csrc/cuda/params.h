// What each CUDA op is told. Pointers are raw and on the device, counts and strides are in elements.
//
// `num_rows` (may be null: then `rows` counts) is the true number of rows, at most `rows`, known to the device only:
// rows past it are neither read nor written, so that one captured graph serves any count.
#pragma once

#include <stdint.h>

#include "kernels/dtype.h"

namespace tide::cuda {

// y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], rounded; then, with a residual, + residual[m, n], rounded again.
// With a norm x[m] is the RMS norm of that row: x[m, k] * norm[k] is rounded once, the row's factor goes to the sum.
// float16 has no norm, since the product may overflow before it is scaled down.
// Gated: weight and bias have 2 * out_features rows, first those of the gate, then those of up, and
// y = silu(gate) * up. Gate, up and silu(gate) are rounded to the storage type before they are used.
struct LinearParams {
    const void* x;            // [rows, in_features], row stride below
    const void* weight;       // [out_features, in_features], contiguous; gated: [2 * out_features, in_features]
    const void* bias;         // [out_features] or null; gated: [2 * out_features]
    const void* norm;         // [in_features] or null
    const void* residual;     // [rows, out_features], row stride below, or null; may be y
    void* y;                  // [rows, out_features], row stride below
    const int32_t* num_rows;  // [1] or null
    int64_t rows;
    int64_t in_features;
    int64_t out_features;  // columns of y
    int64_t x_stride;
    int64_t y_stride;
    int64_t residual_stride;
    float norm_eps;
    bool gated;
};

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
    void* workspace;              // paged_attention_workspace(...) bytes, 16-byte aligned, cleared once (see ops.h)
    const int32_t* num_rows;      // [1] or null
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
    int64_t window;  // <= 0: none
    float softcap;   // <= 0: none
    bool fresh;      // the launch before it wrote K and V of these queries, and no other pages
};

}  // namespace tide::cuda
