// Scores of a router: normed features and confidence -> bottleneck -> silu -> score, in one launch.
// A CTA takes a few rows and a few numbers of the bottleneck, and its threads share out the width; the last CTA to
// finish for these rows adds up what all have found. The norm is a factor of the whole row, so it is applied to the
// finished products and the features are read once. How many rows and numbers a CTA takes is a matter of speed only:
// the columns of a thread and the order in which the threads are added never change.
#include "cuda/common/block.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/tuning.h"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

constexpr int kRouterThreads = 256;
constexpr int kRouterWarps = kRouterThreads / kWarp;
constexpr int64_t kStep = kRouterThreads * 2;  // columns; a thread takes two neighbours

// Columns k and k + 1 of a row; past its width something that `numbers` makes zeros. Without a branch, so that many
// loads are on their way at once. kAligned: both may be read in one, and the width is even.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
    T first, second;

    template <bool kAligned>
    static __device__ Pair load(const T* row, int64_t k, int64_t width) {
        const int64_t at = k < width ? k : 0;
        if constexpr (kAligned) return *reinterpret_cast<const Pair*>(row + at);
        return {row[at], row[k + 1 < width ? k + 1 : 0]};
    }
    __device__ float2 numbers(int64_t k, int64_t width) const {
        return {k < width ? to_float(first) : 0.0f, k + 1 < width ? to_float(second) : 0.0f};
    }
};

// kCount sums over the lanes of a warp, each added in the order of warp_sum; a step leaves a lane half as many. In the
// end lane l has max(kCount / 32, 1) of them, those from l * kCount / 32 on.
template <int kCount, int kDistance = kWarp / 2>
__device__ __forceinline__ void warp_sums(float* values) {
    if constexpr (kCount == 1) {
#pragma unroll
        for (int distance = kDistance; distance > 0; distance /= 2)
            values[0] += __shfl_xor_sync(kAllLanes, values[0], distance);
    } else if constexpr (kDistance > 0) {
        const bool upper = threadIdx.x & kDistance;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float mine = upper ? values[i + kCount / 2] : values[i];
            const float other = upper ? values[i] : values[i + kCount / 2];
            values[i] = mine + __shfl_xor_sync(kAllLanes, other, kDistance);
        }
        warp_sums<kCount / 2, kDistance / 2>(values);
    }
}

template <int kCount>
__device__ __forceinline__ void leave_sums(float* values, float* to) {
    warp_sums<kCount>(values);
    constexpr int kPerLane = kCount > kWarp ? kCount / kWarp : 1, kLanes = kCount < kWarp ? kWarp / kCount : 1;
    const int lane = threadIdx.x % kWarp;
    if (lane % kLanes != 0) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to[lane / kLanes * kPerLane + i] = values[i];
}

// What one number of the bottleneck adds to the score, once its product is known.
struct Unit {
    float bias, of_log_probability, of_lead, out;

    __device__ Unit(const RouterParams& p, int64_t unit) {
        const float* down = p.down + unit * (p.width + 2);
        bias = p.down_bias[unit];
        of_log_probability = down[p.width];
        of_lead = down[p.width + 1];
        out = p.out[unit];
    }

    template <typename T>
    __device__ float adds(const RouterParams& p, int64_t row, float dot, float squares, T) const {
        // As the router itself, which rounds the confidence to the features' type.
        const float log_probability = round_to<T>(-logf(p.sum[row]));
        const float lead = round_to<T>(p.best[row] - p.second[row]);
        const float factor = rsqrtf(squares / static_cast<float>(p.width) + p.eps);
        float value = fmaf(dot, factor, bias);
        value = fmaf(of_log_probability, log_probability, value);
        value = fmaf(of_lead, lead, value);
        return value / (1.0f + expf(-value)) * out;
    }
};

// By one warp.
__device__ void write_score(const RouterParams& p, int64_t row) {
    const float* partials = p.partials + row * p.bottleneck;
    float sum = 0.0f;
    for (int64_t unit = threadIdx.x % kWarp; unit < p.bottleneck; unit += kWarp) sum += __ldcg(partials + unit);
    const float score = 1.0f / (1.0f + expf(-(warp_sum(sum) + p.out_bias[0])));
    if (threadIdx.x % kWarp == 0) p.scores[row] = score;
}

template <typename T, int kRows, int kUnits, bool kAligned>
__global__ void __launch_bounds__(kRouterThreads, 1) router_kernel(RouterParams p, int64_t unit_blocks) {
    constexpr int kSums = kRows * kUnits, kAhead = kUnits < 8 ? 8 / kUnits : 1;  // steps whose loads go out together
    constexpr bool kFeaturesAhead = kRows <= 8;                                  // the registers allow it
    static_assert(kSums <= kRouterThreads);
    __shared__ float shared[kRouterWarps][kSums + kRows];
    let_next_start();
    const int64_t tile = blockIdx.x / unit_blocks, first_unit = (blockIdx.x - tile * unit_blocks) * kUnits;
    const auto unit_at = [&](int u) { return min(first_unit + u, p.bottleneck - 1); };  // the last one again and again
    const auto column = [](int64_t begin, int step) { return begin + step * kStep + threadIdx.x * 2; };
    Pair<float> norm[kAhead], down[kAhead][kUnits];
    const auto fetch_weights = [&](int64_t begin) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            norm[a] = Pair<float>::template load<kAligned>(p.norm, column(begin, a), p.width);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const float* row = p.down + unit_at(u) * (p.width + 2);
                down[a][u] = Pair<float>::template load<kAligned>(row, column(begin, a), p.width);
            }
        }
    };
    fetch_weights(0);  // no kernel writes weights, so they need not wait
    const Unit unit(p, unit_at(threadIdx.x % kUnits));
    wait_for_previous();
    const int64_t first = tile * kRows;
    Pair<T> features[kAhead][kRows];
    const auto fetch_features = [&](int64_t begin) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {  // the last row again and again, where there are no more
            const T* row = static_cast<const T*>(p.features) + min(first + r, p.rows - 1) * p.features_stride;
#pragma unroll
            for (int a = 0; a < kAhead; ++a)
                features[a][r] = Pair<T>::template load<kAligned>(row, column(begin, a), p.width);
        }
    };
    if constexpr (kFeaturesAhead) fetch_features(0);

    float dots[kSums] = {}, squares[kRows] = {};
    for (int64_t begin = 0; begin < p.width; begin += kAhead * kStep) {
        if constexpr (!kFeaturesAhead) fetch_features(begin);
        float2 weights[kAhead][kUnits], x[kAhead][kRows];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int64_t k = column(begin, a);
            const float2 scale = norm[a].numbers(k, p.width);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) weights[a][u] = {down[a][u].first * scale.x, down[a][u].second * scale.y};
#pragma unroll
            for (int r = 0; r < kRows; ++r) x[a][r] = features[a][r].numbers(k, p.width);
        }
        const int64_t next = begin + kAhead * kStep;
        if (next < p.width) {  // on their way while these are added up
            fetch_weights(next);
            if constexpr (kFeaturesAhead) fetch_features(next);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                squares[r] = fmaf(x[a][r].y, x[a][r].y, fmaf(x[a][r].x, x[a][r].x, squares[r]));
#pragma unroll
                for (int u = 0; u < kUnits; ++u) {
                    float& dot = dots[r * kUnits + u];
                    dot = fmaf(x[a][r].y, weights[a][u].y, fmaf(x[a][r].x, weights[a][u].x, dot));
                }
            }
        }
    }
    float* own = shared[threadIdx.x / kWarp];
    leave_sums<kSums>(dots, own);
    leave_sums<kRows>(squares, own + kSums);
    __syncthreads();
    const int r = threadIdx.x / kUnits, u = threadIdx.x % kUnits;
    if (threadIdx.x < kSums && first + r < p.rows && first_unit + u < p.bottleneck) {
        float dot = 0.0f, square = 0.0f;
#pragma unroll
        for (int w = 0; w < kRouterWarps; ++w) {
            dot += shared[w][threadIdx.x];
            square += shared[w][kSums + r];
        }
        p.partials[(first + r) * p.bottleneck + first_unit + u] = unit.adds(p, first + r, dot, square, T{});
    }
    if (!last_to_finish(p.counters + tile, static_cast<uint32_t>(unit_blocks))) return;
    for (int row = threadIdx.x / kWarp; row < kRows && first + row < p.rows; row += kRouterWarps)
        write_score(p, first + row);
}

int64_t count_ctas(const RouterParams& p, int64_t rows, int64_t units) {
    return (p.rows + rows - 1) / rows * ((p.bottleneck + units - 1) / units);
}

template <typename T, int kRows, int kUnits>
void launch_tile(const RouterParams& p, bool aligned, cudaStream_t stream) {
    const auto kernel = aligned ? router_kernel<T, kRows, kUnits, true> : router_kernel<T, kRows, kUnits, false>;
    const int64_t unit_blocks = (p.bottleneck + kUnits - 1) / kUnits;
    launch("router", kernel, LaunchShape{count_ctas(p, kRows, kUnits), kRouterThreads}, stream, p, unit_blocks);
}

}  // namespace

void router(DType dtype, const RouterParams& p, cudaStream_t stream) {
    if (p.rows == 0) return;
    const int64_t busy = int64_t{current_device("router").num_sms} * tuning::kBusyQuarters / 4;
    with_storage("router", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        const auto pairs = [](const void* data, int64_t stride, int64_t bytes) {
            return reinterpret_cast<uintptr_t>(data) % (2 * bytes) == 0 && stride % 2 == 0;
        };
        const bool aligned = pairs(p.features, p.features_stride, sizeof(T)) && pairs(p.norm, p.width, sizeof(float)) &&
                             pairs(p.down, p.width, sizeof(float));
        // The largest tile that still gives most multiprocessors something to do.
        if (p.rows == 1) return launch_tile<T, 1, 1>(p, aligned, stream);
        if (count_ctas(p, 16, 8) >= busy) return launch_tile<T, 16, 8>(p, aligned, stream);
        if (count_ctas(p, 8, 4) >= busy) return launch_tile<T, 8, 4>(p, aligned, stream);
        launch_tile<T, 4, 2>(p, aligned, stream);
    });
}

}  // namespace tide::cuda
