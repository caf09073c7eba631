// From a float32 sum to a stored output: bias, gate, residual, with the roundings that params.h promises.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/linear/linear.h"

namespace tide::cuda {

// Which row of the weight belongs to column `column` of y; `up` picks the second half of a gated weight.
__device__ inline int64_t weight_row(const LinearParams& p, int64_t column, bool up) {
    return up ? column + p.out_features : column;
}

template <typename T>
__device__ inline float silu_mul(float gate, float up) {
    const float g = round_to<T>(gate);
    return round_to<T>(g / (1.0f + expf(-g))) * round_to<T>(up);
}

// What is added to an output in the end; nothing where there is no residual.
template <typename T>
__device__ inline T residual_of(const LinearParams& p, int64_t row, int64_t column) {
    return p.residual ? static_cast<const T*>(p.residual)[row * p.residual_stride + column] : T{};
}

// Outputs of one column in the rows `row(0)` to `row(kCount - 1)`, of which the first `live` are written; the others
// may name any row that exists. `ups` counts for gated outputs only. Several at a time, so that none waits for another.
template <typename T, int kCount, typename Row>
__device__ inline void write_outputs(const LinearParams& p, int64_t column, int live, float (&sums)[kCount],
                                     float (&ups)[kCount], const T (&residuals)[kCount], Row&& row) {
    if (p.bias) {
        const T* bias = static_cast<const T*>(p.bias);
        const float of_sum = to_float(bias[weight_row(p, column, false)]);
        const float of_up = p.gated ? to_float(bias[weight_row(p, column, true)]) : 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            sums[i] += of_sum;
            ups[i] += of_up;
        }
    }
    if (p.gated) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] = silu_mul<T>(sums[i], ups[i]);
    }
    if (p.residual) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] = round_to<T>(sums[i]) + to_float(residuals[i]);
    }
    T* y = static_cast<T*>(p.y) + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < live) y[row(i) * p.y_stride] = from_float<T>(sums[i]);
    }
}

template <typename T>
__device__ inline void write_output(const LinearParams& p, int64_t row, int64_t column, float sum, float up,
                                    T residual) {
    float sums[] = {sum}, ups[] = {up};
    const T residuals[] = {residual};
    write_outputs<T>(p, column, 1, sums, ups, residuals, [&](int) { return row; });
}

}  // namespace tide::cuda
