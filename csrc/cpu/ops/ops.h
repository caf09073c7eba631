// The native ops: they check sizes, choose the kernel for the storage type and spread work over threads.
// Pointers must be valid for the sizes given; what cannot be true raises std::invalid_argument, an index
// outside its pool std::out_of_range, and nothing has been written by then.
#pragma once

#include "cpu/kernels/params.h"

namespace tide {

// x [rows, in_features], weight [out_features, in_features], bias [out_features] or null, y [rows, out_features].
// The weight is of the same dtype as the others, or bfloat16 where they are float32. Batch-invariant: a row's result
// does not depend on the other rows nor on the number of threads.
void linear(DType dtype, DType weight_dtype, const void* x, const void* weight, const void* bias, void* y, int64_t rows,
            int64_t in_features, int64_t out_features);

// The same for weights in panels (ops/panels.h); x is rounded to 8 bits, 32 neighbours with one scale. Batch-invariant.
void quantised_linear(PanelKind kind, const float* x, const void* panels, const float* bias, float* y, int64_t rows,
                      int64_t in_features, int64_t out_features);

// x, y [rows, width], weight [width].
void rms_norm(DType dtype, const void* x, const void* weight, void* y, int64_t rows, int64_t width, float eps);

// gate, up, y: `count` elements each.
void silu_mul(DType dtype, const void* gate, const void* up, void* y, int64_t count);

// Rotary positions in halves, as Hugging Face's Llama applies them.
void rotary(DType dtype, const RotaryParams& params, int64_t num_tokens);

struct WriteKvParams {
    const void* k;         // [T, num_kv_heads, key_dim], strides below, last dim contiguous
    const void* v;         // [T, num_kv_heads, value_dim]
    void* k_pool;          // [num_blocks, num_kv_heads, block_size, key_dim]
    void* v_pool;          // [num_blocks, num_kv_heads, block_size, value_dim]
    const int64_t* slots;  // [T], block * block_size + offset; negative: skip
    int64_t num_tokens;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t k_token_stride;
    int64_t k_head_stride;
    int64_t v_token_stride;
    int64_t v_head_stride;
    int64_t num_blocks;
    int64_t block_size;
};
void write_kv(DType dtype, const WriteKvParams& params);

// query_starts [num_rows + 1], context_lens [num_rows]; num_tokens is T of q and out.
void paged_attention(DType dtype, const PagedAttentionParams& params, const int32_t* query_starts,
                     const int32_t* context_lens, int64_t num_rows, int64_t num_tokens, int64_t num_blocks);

// x [rows, width] float32: the largest number of each row and the lowest index it stands at, as Torch's max has it: NaN
// if the row holds one, at the first of them.
void best(const float* x, int64_t rows, int64_t width, float* maxima, int64_t* indices);

// logits [rows, width] float32: the log-probability of each row's best one and its lead over the second, to
// out[row * out_stride] and the number after it; its index, the lowest among equals, to indices. What is not a number
// makes the log-probability none. Batch-invariant.
void confidence(const float* logits, int64_t rows, int64_t width, float* out, int64_t out_stride, int64_t* indices);

}  // namespace tide
