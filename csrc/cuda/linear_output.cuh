// From a float32 sum to a stored output: bias, gate, residual, with the roundings that params.h promises.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/params.h"

namespace tide::cuda {

// Which row of the weight belongs to column `column` of y; `up` picks the second half of a gated weight.
__device__ inline int64_t weight_row(const LinearParams& p, int64_t column, bool up) {
    return up ? column + p.out_features : column;
}

template <typename T>
__device__ inline float with_bias(const LinearParams& p, float sum, int64_t weight_row) {
    return p.bias ? sum + to_float(static_cast<const T*>(p.bias)[weight_row]) : sum;
}

template <typename T>
__device__ inline float silu_mul(float gate, float up) {
    const float g = round_to<T>(gate);
    return round_to<T>(g / (1.0f + expf(-g))) * round_to<T>(up);
}

// `up` counts for gated outputs only.
template <typename T>
__device__ inline void write_output(const LinearParams& p, int64_t row, int64_t column, float sum, float up) {
    float value = with_bias<T>(p, sum, weight_row(p, column, false));
    if (p.gated) value = silu_mul<T>(value, with_bias<T>(p, up, weight_row(p, column, true)));
    if (p.residual) {
        const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride + column;
        value = round_to<T>(value) + to_float(*residual);
    }
    static_cast<T*>(p.y)[row * p.y_stride + column] = from_float<T>(value);
}

}  // namespace tide::cuda
