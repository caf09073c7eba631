// The small ops. Each is one launch, takes the caller's stream and allocates nothing.
// Pointers are raw and on the device, counts and strides are in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace tide::cuda {

// y = norm of x times weight
struct RmsNormParams {
    const void* x;       // [rows, width]
    const void* weight;  // [width]
    void* y;             // [rows, width]; may be x
    int64_t rows;
    int64_t width;
    int64_t x_stride;
    int64_t y_stride;
    float eps;
};

// y = silu(gate) * up
struct SiluMulParams {
    const void* gate;  // [rows, width]
    const void* up;    // [rows, width]
    void* y;           // [rows, width]; may be gate or up
    int64_t rows;
    int64_t width;
    int64_t gate_stride;
    int64_t up_stride;
    int64_t y_stride;
};

// Some heads of every token.
struct Heads {
    const void* data;  // [rows, heads, dim], last dim contiguous
    int64_t heads;
    int64_t token_stride;
    int64_t head_stride;
};

// q and k are normed where they have a weight and rotated where there are tables; q goes to q_out, k and v to the
// pools. Any of the three may have no heads.
struct RotaryWriteParams {
    Heads q, k, v;
    const void* q_norm;        // [key_dim] or null
    const void* k_norm;        // [key_dim] or null
    const void* cos;           // [num_positions, key_dim] or null: nothing is rotated
    const void* sin;           // [num_positions, key_dim]
    const int64_t* positions;  // [rows], or null: token i stands at position i
    const int64_t* slots;      // [rows] block * block_size + offset; what is outside the pools is not written
    void* q_out;               // [rows, q.heads, key_dim]; may be q
    void* k_pool;              // [num_blocks, k.heads, block_size, key_dim]
    void* v_pool;              // [num_blocks, v.heads, block_size, value_dim]
    int64_t rows;
    int64_t q_out_token_stride;
    int64_t q_out_head_stride;
    int64_t key_dim;
    int64_t value_dim;
    int64_t num_positions;
    int64_t num_blocks;
    int64_t block_size;
    float eps;
};

// How each row of logits ends. Order: a NaN stands above every number, and of equals the first.
struct Top2LogsumexpParams {
    const void* x;       // [rows, width]
    float* best;         // [rows]
    int64_t* index;      // [rows] where the best stands
    float* second;       // [rows] the largest of the others, -inf where there are none
    float* sum;          // [rows] of exp(x - best)
    void* partials;      // top2_logsumexp_partials(rows, width) bytes
    uint32_t* counters;  // [rows], all zero, and zero again afterwards
    int64_t rows;
    int64_t width;
    int64_t x_stride;
};

// The router of tide_core/exits/artefact/router.py; its weights are float32.
struct RouterParams {
    const void* features;    // [rows, width]
    const float* best;       // [rows], as top2_logsumexp writes them
    const float* second;     // [rows]
    const float* sum;        // [rows]
    const float* norm;       // [width]
    const float* down;       // [bottleneck, width + 2]
    const float* down_bias;  // [bottleneck]
    const float* out;        // [bottleneck]
    const float* out_bias;   // [1]
    float* scores;           // [rows]
    float* partials;         // [rows, bottleneck]
    uint32_t* counters;      // [rows], all zero, and zero again afterwards
    int64_t rows;
    int64_t width;
    int64_t features_stride;
    int64_t bottleneck;
    float eps;
};

// embed: y[i] = x[index[i]], and NaN where index[i] is not in [0, limit). scatter_rows: y[index[i]] = x[i] where
// index[i] is in it. `limit` counts the rows of the side that the index points into.
struct RowsParams {
    const void* x;
    void* y;
    const int64_t* index;  // [rows]
    int64_t rows;
    int64_t limit;
    int64_t width;
    int64_t x_stride;
    int64_t y_stride;
};

// y[i] = [norm of states[i] | norm of deep[deep_slots[i]]] + table[min(distances[i], max_distance)]. The deep state is
// zeros where the distance is 0 or the slot negative, and NaN where the slot is past the end.
struct ExitInputParams {
    const void* states;         // [rows, width]
    const void* state_norm;     // [width]
    const void* deep;           // [num_deep, deep_width]
    const void* deep_norm;      // [deep_width]
    const void* table;          // [max_distance + 1, width + deep_width], contiguous
    const int64_t* deep_slots;  // [rows]
    const int64_t* distances;   // [rows]
    void* y;                    // [rows, width + deep_width]
    int64_t rows;
    int64_t width;
    int64_t deep_width;
    int64_t num_deep;
    int64_t max_distance;
    int64_t states_stride;
    int64_t deep_stride;
    int64_t y_stride;
    float eps;
};

void rms_norm(DType dtype, const RmsNormParams& params, cudaStream_t stream);
void silu_mul(DType dtype, const SiluMulParams& params, cudaStream_t stream);
void rotary_write(DType dtype, const RotaryWriteParams& params, cudaStream_t stream);
void embed(DType dtype, const RowsParams& params, cudaStream_t stream);
void scatter_rows(DType dtype, const RowsParams& params, cudaStream_t stream);
void exit_input(DType dtype, const ExitInputParams& params, cudaStream_t stream);

void top2_logsumexp(DType dtype, const Top2LogsumexpParams& params, cudaStream_t stream);
int64_t top2_logsumexp_partials(int64_t rows, int64_t width);  // bytes
void router(DType dtype, const RouterParams& params, cudaStream_t stream);

}  // namespace tide::cuda
