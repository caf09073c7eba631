// The linear for everything the tensor-core kernel does not take: float32, odd widths, loose alignment, old devices.
//
// A warp owns four weight rows (gated: two of the gate, two of up) and eight rows of x. Lane l adds up columns
// 128 i + 4 l + (0..3) in order, then the lanes are added in a fixed tree: nothing depends on the other rows. For a
// norm it adds up the squares of x in the same way (linear_norm.cuh).
#pragma once

#include "cuda/common/launch.h"
#include "cuda/linear/norm.cuh"
#include "cuda/linear/output.cuh"

namespace tide::cuda {

constexpr int kPlainWarps = 4;
constexpr int kPlainColumns = 4;  // weight rows per warp
constexpr int kPlainTokens = 8;
constexpr int kPlainVector = 4;

// Four neighbours; the vector form needs them aligned to their size.
template <typename T, bool kAligned>
__device__ inline void load_four(const T* from, int64_t left, float (&to)[kPlainVector]) {
    if constexpr (kAligned) {
        struct alignas(sizeof(T) * kPlainVector) Vector {
            T v[kPlainVector];
        };
        const Vector vector = *reinterpret_cast<const Vector*>(from);
#pragma unroll
        for (int i = 0; i < kPlainVector; ++i) to[i] = to_float(vector.v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kPlainVector; ++i) to[i] = i < left ? to_float(from[i]) : 0.0f;
    }
}

template <typename T, bool kAligned, bool kNormed>
__global__ void __launch_bounds__(kPlainWarps * 32)
    linear_plain(const __grid_constant__ LinearParams p, uint32_t token_blocks) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_token = int64_t{blockIdx.x % token_blocks} * kPlainTokens;
    const int outputs = p.gated ? kPlainColumns / 2 : kPlainColumns;
    const int64_t first_column = (int64_t{blockIdx.x / token_blocks} * kPlainWarps + warp) * outputs;
    if (first_column >= p.out_features) return;

    // Rows that do not exist are read as the last one that does, and never written.
    const T* weight[kPlainColumns];
    const T* x[kPlainTokens];
#pragma unroll
    for (int n = 0; n < kPlainColumns; ++n) {
        const int64_t column = min(first_column + n % outputs, p.out_features - 1);
        weight[n] = static_cast<const T*>(p.weight) + weight_row(p, column, n >= outputs) * p.in_features;
    }
#pragma unroll
    for (int m = 0; m < kPlainTokens; ++m)
        x[m] = static_cast<const T*>(p.x) + min(first_token + m, p.rows - 1) * p.x_stride;

    float sums[kPlainColumns][kPlainTokens] = {}, squares[kPlainTokens] = {};
    for (int64_t k = lane * kPlainVector; k < p.in_features; k += 32 * kPlainVector) {
        float w[kPlainColumns][kPlainVector], norm[kPlainVector];
#pragma unroll
        for (int n = 0; n < kPlainColumns; ++n) load_four<T, kAligned>(weight[n] + k, p.in_features - k, w[n]);
        if constexpr (kNormed) load_four<T, kAligned>(static_cast<const T*>(p.norm) + k, p.in_features - k, norm);
#pragma unroll
        for (int m = 0; m < kPlainTokens; ++m) {
            float v[kPlainVector];
            load_four<T, kAligned>(x[m] + k, p.in_features - k, v);
            if constexpr (kNormed) {
#pragma unroll
                for (int i = 0; i < kPlainVector; ++i) {
                    squares[m] = fmaf(v[i], v[i], squares[m]);
                    v[i] = round_to<T>(v[i] * norm[i]);
                }
            }
#pragma unroll
            for (int n = 0; n < kPlainColumns; ++n) {
#pragma unroll
                for (int i = 0; i < kPlainVector; ++i) sums[n][m] = fmaf(w[n][i], v[i], sums[n][m]);
            }
        }
    }

    // Lane n * 8 + m keeps output (n, m).
    float mine = 0.0f, factor = 1.0f;
#pragma unroll
    for (int n = 0; n < kPlainColumns; ++n) {
#pragma unroll
        for (int m = 0; m < kPlainTokens; ++m) {
            float sum = sums[n][m];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == n * kPlainTokens + m) mine = sum;
        }
    }
    if constexpr (kNormed) {
#pragma unroll
        for (int m = 0; m < kPlainTokens; ++m) {
            float sum = squares[m];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane % kPlainTokens == m) factor = norm_factor(p, sum, 1.0f / static_cast<float>(p.in_features));
        }
        mine = __fmul_rn(mine, factor);
    }
    const float up = __shfl_down_sync(~0u, mine, 16);  // of output n, two weight rows further on
    const int n = lane / kPlainTokens, m = lane % kPlainTokens;
    if (n < outputs && first_column + n < p.out_features && first_token + m < p.rows) {
        const T residual = residual_of<T>(p, first_token + m, first_column + n);
        write_output<T>(p, first_token + m, first_column + n, mine, up, residual);
    }
}

template <typename T>
void launch_linear_plain(const LinearParams& p, bool aligned, cudaStream_t stream) {
    const int64_t columns = kPlainWarps * (p.gated ? kPlainColumns / 2 : kPlainColumns);
    const int64_t token_blocks = (p.rows + kPlainTokens - 1) / kPlainTokens;
    const LaunchShape shape = {(p.out_features + columns - 1) / columns * token_blocks, kPlainWarps * 32, 0, 1,
                               Effect::kNone};
    const auto run = [&](auto kernel) {
        launch("linear", kernel, shape, stream, p, static_cast<uint32_t>(token_blocks));
    };
    if (!p.norm) return run(aligned ? linear_plain<T, true, false> : linear_plain<T, false, false>);
    run(aligned ? linear_plain<T, true, true> : linear_plain<T, false, true>);
}

}  // namespace tide::cuda
