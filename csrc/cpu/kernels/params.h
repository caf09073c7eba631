// The arguments of each kernel. Pointers are raw, counts and strides are in elements.
#pragma once

#include <stdint.h>

#include "cpu/kernels/panels.h"
#include "dtype.h"

namespace tide {

// y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]
struct LinearParams {
    const float* x;      // [rows, in_features], already float32
    const void* weight;  // [out_features, in_features]
    const void* bias;    // [out_features] or null
    void* y;             // [rows, out_features]
    int64_t rows;
    int64_t in_features;
    int64_t out_features;
};

// The same in bfloat16 by the tile unit, which wants x as pairs along k (see linear_tiles.cpp).
struct TileLinearParams {
    const BFloat16* x;       // [rows, in_features]
    uint32_t* pairs;         // of x: written by tile_pack, read by tile_linear
    const BFloat16* weight;  // [out_features, in_features]
    const BFloat16* bias;    // [out_features] or null
    BFloat16* y;             // [rows, out_features]
    int64_t rows;
    int64_t in_features;
    int64_t out_features;
};

// The same with block-quantised weights (see panels.h) and rows of x in 8 bits.
struct QuantisedLinearParams {
    PanelKind kind;
    const void* x;       // rows by quantise_rows
    const void* panels;  // of 16 outputs, the last one filled up
    const float* bias;   // [out_features] or null
    float* y;            // [rows, out_features]
    int64_t rows;
    int64_t in_features;
    int64_t out_features;
};

struct RmsNormParams {
    const void* x;       // [rows, width]
    const void* weight;  // [width]
    void* y;             // [rows, width]
    int64_t width;
    float eps;
};

// y[i] = silu(gate[i]) * up[i]
struct SiluMulParams {
    const void* gate;
    const void* up;
    void* y;
};

// Rotary positions of one tensor of heads.
struct RotaryParams {
    const void* x;    // [T, num_heads, dim], strides below, last dim contiguous
    const void* cos;  // [T, dim]
    const void* sin;  // [T, dim]
    void* out;        // [T, num_heads, dim]
    int64_t num_heads;
    int64_t dim;
    int64_t token_stride;
    int64_t head_stride;
};

struct PagedAttentionParams {
    const void* q;                // [T, num_heads, key_dim], strides below, last dim contiguous
    const void* k_pool;           // [num_blocks, num_kv_heads, block_size, key_dim]
    const void* v_pool;           // [num_blocks, num_kv_heads, block_size, value_dim]
    const int32_t* block_tables;  // [R, max_blocks]
    void* out;                    // [T, num_heads, value_dim]
    int64_t q_token_stride;
    int64_t q_head_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t key_dim;
    int64_t value_dim;
    int64_t block_size;
    int64_t max_blocks;
    float scaling;
    int64_t window;  // <= 0: none
    float softcap;   // <= 0: none
};

// A few neighbouring queries of one row for one kv head: the unit of work of paged attention.
struct AttentionTask {
    int64_t row;
    int64_t kv_head;
    int64_t first_query;  // index into T
    int64_t num_queries;
    int64_t first_position;  // of first_query; the others follow it one by one
};

// The largest of some numbers (NaN if any is), the largest of the others, and the sum of exp(x - best).
struct Top2 {
    float best;
    float second;
    float sum;
};

}  // namespace tide
