// The linear.
//
// Pointers are raw and on the device, counts and strides are in elements. The op enqueues its kernels on `stream` and
// returns: nothing is allocated, nothing waits for the device, and all of it can be captured in a graph. A launch that
// fails throws std::runtime_error naming the op.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace tide::cuda {

// y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], rounded; then, with a residual, + residual[m, n], rounded again.
// With a norm x[m] is the RMS norm of that row: x[m, k] * norm[k] is rounded once, the row's factor goes to the sum.
// float16 has no norm, since the product may overflow before it is scaled down.
// Gated: weight and bias have 2 * out_features rows, first those of the gate, then those of up, and
// y = silu(gate) * up. Gate, up and silu(gate) are rounded to the storage type before they are used.
struct LinearParams {
    const void* x;         // [rows, in_features], row stride below
    const void* weight;    // [out_features, in_features], contiguous; gated: [2 * out_features, in_features]
    const void* bias;      // [out_features] or null; gated: [2 * out_features]
    const void* norm;      // [in_features] or null
    const void* residual;  // [rows, out_features], row stride below, or null; may be y
    void* y;               // [rows, out_features], row stride below
    int64_t rows;
    int64_t in_features;
    int64_t out_features;  // columns of y
    int64_t x_stride;
    int64_t y_stride;
    int64_t residual_stride;
    float norm_eps;
    bool gated;
};

// The weight in E4M3, each number times its scale in float32, rounded to bfloat16; the bits are those of linear() with
// that matrix. x, norm, bias, residual and y are bfloat16. The columns are packed (fp8_stage.h).
struct Fp8LinearParams : LinearParams {
    const float* scales;   // [rows of blocks, columns of blocks]
    int64_t scale_stride;  // between rows of blocks
    uint32_t block_rows;
    int scale_shift;  // a block has 1 << scale_shift columns, at least 64; kWholeRows: all of them
};
constexpr int kWholeRows = 31;

// The same of a weight whose bits are dealt out (common/fp8.cuh), as those are whose scales all are can_deal().
struct DealtFp8LinearParams : Fp8LinearParams {};

// Any shape is right. Fast when in_features, x_stride and the pointers of x and weight are multiples of 16 bytes, for
// up to 64 rows; for any number where fast_for_many_rows() and there is no norm, and a gated y has whole 8 columns.
void linear(DType dtype, const LinearParams& params, cudaStream_t stream);

// in_features is a multiple of 16, x_stride of 8, and the pointers of x, weight and norm of 16 bytes. Any number of
// rows, where reads_fp8().
void fp8_linear(const Fp8LinearParams& params, bool dealt, cudaStream_t stream);

// Whether the current device has a linear that reads E4M3; elsewhere the matrix is widened first.
bool reads_fp8();

// The matrix that fp8_linear() multiplies with, not packed: y [out_features, in_features] in bfloat16. x and its rows
// do not count. A linear that follows in the stream may read it.
void widen_fp8(const Fp8LinearParams& params, bool dealt, cudaStream_t stream);

// Whether the current device has a linear for many half-width rows, with the bits of the one for few.
bool fast_for_many_rows();

}  // namespace tide::cuda
