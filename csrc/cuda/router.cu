// Scores of a router: normed features and confidence -> bottleneck -> silu -> score, in one launch.
// A CTA takes a few rows and eight numbers of the bottleneck, one per warp, so that a weight is read once for the rows;
// the last CTA to finish for these rows adds up what all have found. The norm is a factor of the whole row, so it is
// applied to the finished products and the features are read once.
#include "cuda/block.cuh"
#include "cuda/launch.h"
#include "cuda/pack.cuh"
#include "cuda/small_ops.h"

namespace tide::cuda {
namespace {

constexpr int kRows = 4;
constexpr int kWarps = 8;
constexpr int kUnroll = 8;  // loads in flight

__device__ void prefetch(const float* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// One row of the bottleneck's weights times the features of each row, and the squares of these, over the whole warp.
template <typename T>
__device__ void products(const RouterParams& p, const float* down, const T* const features[kRows], float* dots,
                         float* squares) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) dots[r] = squares[r] = 0.0f;
#pragma unroll kUnroll
    for (int64_t k = threadIdx.x % kWarp; k < p.width; k += kWarp) {
        const float weight = down[k] * p.norm[k];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float x = to_float(features[r][k]);
            dots[r] = fmaf(x, weight, dots[r]);
            squares[r] = fmaf(x, x, squares[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        dots[r] = warp_sum(dots[r]);
        squares[r] = warp_sum(squares[r]);
    }
}

template <typename T>
__device__ float hidden(const RouterParams& p, const float* down, int64_t unit, int64_t row, float dot, float squares) {
    // As the router itself, which rounds the confidence to the features' type.
    const float log_probability = round_to<T>(-logf(p.sum[row]));
    const float lead = round_to<T>(p.best[row] - p.second[row]);
    const float scale = rsqrtf(squares / static_cast<float>(p.width) + p.eps);
    float value = fmaf(dot, scale, p.down_bias[unit]);
    value = fmaf(down[p.width], log_probability, value);
    value = fmaf(down[p.width + 1], lead, value);
    return value / (1.0f + expf(-value)) * p.out[unit];
}

// By one warp.
__device__ void write_score(const RouterParams& p, int64_t row) {
    const float* partials = p.partials + row * p.bottleneck;
    float sum = 0.0f;
    for (int64_t unit = threadIdx.x % kWarp; unit < p.bottleneck; unit += kWarp) sum += partials[unit];
    const float score = 1.0f / (1.0f + expf(-(warp_sum(sum) + p.out_bias[0])));
    if (threadIdx.x % kWarp != 0) return;
    p.scores[row] = score;
    if (p.flags != nullptr) p.flags[row] = score >= p.thresholds[row] ? 1 : 0;  // a NaN reaches nothing
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp) router_kernel(RouterParams p, int64_t slices) {
    let_next_start();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t tile = blockIdx.x / slices, unit = (blockIdx.x - tile * slices) * kWarps + warp;
    const float* down = p.down + unit * (p.width + 2);
    if (unit < p.bottleneck) {  // no kernel writes weights, so they need not wait
        for (int64_t k = lane * kWarp; k < p.width; k += kWarp * kWarp) prefetch(down + k);
    }
    wait_for_previous();
    const int64_t rows = count_rows(p.num_rows, p.rows), first = tile * kRows;
    if (first >= rows) return;
    if (unit < p.bottleneck) {
        const T* features[kRows];
        // Rows that are not there repeat the last one, so that every row is computed by the same instructions.
        for (int r = 0; r < kRows; ++r) {
            const int64_t row = first + r < rows ? first + r : rows - 1;
            features[r] = static_cast<const T*>(p.features) + row * p.features_stride;
        }
        float dots[kRows], squares[kRows];
        products(p, down, features, dots, squares);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (lane == r && first + r < rows) {
                const float value = hidden<T>(p, down, unit, first + r, dots[r], squares[r]);
                p.partials[(first + r) * p.bottleneck + unit] = value;
            }
        }
    }
    if (last_to_finish(p.counters + tile, static_cast<uint32_t>(slices)) && warp < kRows && first + warp < rows) {
        write_score(p, first + warp);
    }
}

}  // namespace

int64_t router_counters(int64_t rows) {
    return (rows + kRows - 1) / kRows;
}

void router(DType dtype, const RouterParams& p, cudaStream_t stream) {
    if (p.rows == 0) return;
    const int64_t slices = (p.bottleneck + kWarps - 1) / kWarps;
    with_storage("router", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("router", router_kernel<T>, LaunchShape{router_counters(p.rows) * slices, kWarps * kWarp}, stream, p,
               slices);
    });
}

}  // namespace tide::cuda
