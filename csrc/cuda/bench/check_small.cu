// The ops around the exits against double precision, and a row alone against the same row in a batch.
#include <algorithm>
#include <cmath>

#include "cuda/bench/support.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda::bench {
namespace {

template <typename T>
__global__ void widen(const T* from, float* to, int64_t count) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
        to[i] = to_float(from[i]);
}

template <typename V>
std::vector<V> host(const Buffer& buffer, int64_t count) {
    std::vector<V> values(count);
    require(cudaDeviceSynchronize());
    require(cudaMemcpy(values.data(), buffer.get(), count * sizeof(V), cudaMemcpyDeviceToHost));
    return values;
}

template <typename T>
std::vector<float> widened(const Buffer& buffer, int64_t count) {
    const Buffer wide(count * 4);
    widen<T><<<256, 256>>>(buffer.get<T>(), wide.get<float>(), count);
    return host<float>(wide, count);
}

struct Floats : Buffer {
    Floats(int64_t count, uint64_t seed, float scale) : Buffer(count * 4) { fill(get<float>(), count, seed, scale); }
};

template <typename T>
float rounded(float value) {
    if constexpr (sizeof(T) == 4) return value;
    return std::is_same_v<T, __half> ? __half2float(__float2half_rn(value))
                                     : __bfloat162float(__float2bfloat16_rn(value));
}

struct PeakResults {
    explicit PeakResults(int64_t rows) : best(rows * 4), index(rows * 8), second(rows * 4), sum(rows * 4) {}
    Buffer best, index, second, sum;
};

template <typename T>
void check_peak(int64_t width) {
    constexpr int64_t kRows = 5;
    const std::string name = std::string("peak ") + name_of<T>() + " width=" + std::to_string(width);
    const Buffer logits(kRows * width * sizeof(T)), partials(peak_partials(kRows, width)), counters(kRows * 4);
    fill(logits.get<T>(), kRows * width, 21, 9.0f);
    counters.fill_bytes(0);
    const auto run = [&](int64_t first, int64_t rows, const PeakResults& out) {
        const PeakParams p = {logits.get<T>() + first * width,
                              out.best.get<float>(),
                              out.index.get<int64_t>(),
                              out.second.get<float>(),
                              out.sum.get<float>(),
                              partials.get(),
                              counters.get<uint32_t>(),
                              nullptr,
                              rows,
                              width,
                              width};
        peak(dtype_of<T>(), p, nullptr);
    };
    const PeakResults all(kRows), alone(1);
    run(0, kRows, all);
    const auto x = widened<T>(logits, kRows * width);
    const auto best = host<float>(all.best, kRows), second = host<float>(all.second, kRows);
    const auto sum = host<float>(all.sum, kRows);
    const auto index = host<int64_t>(all.index, kRows);
    for (int64_t row = 0; row < kRows; ++row) {
        const auto begin = x.begin() + row * width, end = begin + width, top = std::max_element(begin, end);
        double total = 0.0;
        float next = -INFINITY;
        for (auto at = begin; at != end; ++at) {
            total += std::exp(static_cast<double>(*at) - *top);
            if (at != top) next = std::max(next, *at);
        }
        expect(best[row] == *top && index[row] == top - begin && second[row] == next, name + ": wrong peak");
        expect(std::fabs(sum[row] - total) <= 1e-5 * total, name + ": wrong sum");
        run(row, 1, alone);
        const bool same = host<float>(alone.best, 1)[0] == best[row] && host<float>(alone.sum, 1)[0] == sum[row] &&
                          host<int64_t>(alone.index, 1)[0] == index[row] &&
                          host<float>(alone.second, 1)[0] == second[row];
        expect(same, name + ": another result alone");
    }
}

template <typename T>
void check_router(int64_t width, int64_t bottleneck) {
    constexpr int64_t kRows = 256;
    const std::string name = std::string("router ") + name_of<T>() + " width=" + std::to_string(width) +
                             " bottleneck=" + std::to_string(bottleneck);
    const Buffer features(kRows * width * sizeof(T));
    fill(features.get<T>(), kRows * width, 31, 5.0f);
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    const Floats norm(width, 32, 2.0f), down(bottleneck * (width + 2), 33, 2.0f * scale), bias(bottleneck, 34, 1.0f);
    const Floats out(bottleneck, 35, 0.3f), out_bias(1, 36, 1.0f), ends(3 * kRows, 37, 1.0f);
    const Buffer partials(kRows * bottleneck * 4), counters(kRows * 4);
    counters.fill_bytes(0);
    std::vector<float> peaks = host<float>(ends, 3 * kRows);  // best, second, sum
    for (int64_t i = 0; i < kRows; ++i) {
        peaks[i] += 4.0f;
        peaks[2 * kRows + i] += 3.0f;
    }
    ends.put(peaks);
    const Buffer scores(kRows * 4), some(kRows * 4);
    const auto run = [&](int64_t first, int64_t rows, const Buffer& to) {
        RouterParams p = {};
        p.features = features.get<T>() + first * width;
        p.best = ends.get<float>() + first;
        p.second = p.best + kRows;
        p.sum = p.second + kRows;
        p.norm = norm.get<float>();
        p.down = down.get<float>();
        p.down_bias = bias.get<float>();
        p.out = out.get<float>();
        p.out_bias = out_bias.get<float>();
        p.scores = to.get<float>();
        p.partials = partials.get<float>();
        p.counters = counters.get<uint32_t>();
        p.rows = rows;
        p.width = width;
        p.features_stride = width;
        p.bottleneck = bottleneck;
        p.eps = 1e-5f;
        router(dtype_of<T>(), p, nullptr);
    };
    run(0, kRows, scores);
    const auto got = host<float>(scores, kRows), x = widened<T>(features, kRows * width);
    const auto n = host<float>(norm, width), d = host<float>(down, bottleneck * (width + 2));
    const auto b = host<float>(bias, bottleneck), o = host<float>(out, bottleneck), ob = host<float>(out_bias, 1);
    // A logarithm that lies between two numbers of the type may be rounded to either.
    const double tolerance = sizeof(T) == 4 ? 2e-5 : 4e-3;
    for (const int64_t row : {0, 1, 77, 255}) {
        double squares = 0.0, logit = ob[0];
        for (int64_t k = 0; k < width; ++k) squares += double(x[row * width + k]) * x[row * width + k];
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
        for (int64_t u = 0; u < bottleneck; ++u) {
            const float* weights = d.data() + u * (width + 2);
            double value = 0.0;
            for (int64_t k = 0; k < width; ++k) value += double(x[row * width + k]) * n[k] * weights[k];
            value = value * factor + b[u] + double(weights[width]) * rounded<T>(-std::log(peaks[2 * kRows + row])) +
                    double(weights[width + 1]) * rounded<T>(peaks[row] - peaks[kRows + row]);
            logit += value / (1.0 + std::exp(-value)) * o[u];
        }
        expect(std::fabs(got[row] - 1.0 / (1.0 + std::exp(-logit))) <= tolerance, name + ": wrong score");
    }
    for (const int64_t rows : {1, 3, 8, 33, 64, 130}) {
        run(7, rows, some);
        const auto mine = host<float>(some, rows);
        expect(std::equal(mine.begin(), mine.end(), got.begin() + 7), name + ": other scores in another batch");
    }
}

template <typename T>
void check_exit_input(int64_t width) {
    constexpr int64_t kRows = 9, kDeep = 6, kMax = 3;
    const std::string name = std::string("exit_input ") + name_of<T>() + " width=" + std::to_string(width);
    const Buffer states(kRows * width * sizeof(T)), deep(kDeep * width * sizeof(T)), state_norm(width * sizeof(T));
    const Buffer deep_norm(width * sizeof(T)), table((kMax + 1) * 2 * width * sizeof(T)), slots(kRows * 8);
    const Buffer distances(kRows * 8), y(kRows * 2 * width * sizeof(T)), one(2 * width * sizeof(T));
    fill(states.get<T>(), kRows * width, 41, 5.0f);
    fill(deep.get<T>(), kDeep * width, 42, 3.0f);
    fill(state_norm.get<T>(), width, 43, 2.0f);
    fill(deep_norm.get<T>(), width, 44, 2.0f);
    fill(table.get<T>(), (kMax + 1) * 2 * width, 45, 1.0f);
    const std::vector<int64_t> at = {0, 5, 6, -1, 2, 1000, 3, 4, 1}, far = {1, 2, 1, 1, 0, 0, 3, 99, 3};
    slots.put(at);
    distances.put(far);
    const auto run = [&](int64_t first, int64_t rows, const Buffer& to) {
        const ExitInputParams p = {states.get<T>() + first * width,
                                   state_norm.get(),
                                   deep.get(),
                                   deep_norm.get(),
                                   table.get(),
                                   slots.get<int64_t>() + first,
                                   distances.get<int64_t>() + first,
                                   to.get(),
                                   nullptr,
                                   rows,
                                   width,
                                   kDeep,
                                   kMax,
                                   width,
                                   width,
                                   2 * width,
                                   1e-5f};
        exit_input(dtype_of<T>(), p, nullptr);
    };
    run(0, kRows, y);
    const auto got = widened<T>(y, kRows * 2 * width), s = widened<T>(states, kRows * width);
    const auto d = widened<T>(deep, kDeep * width), sn = widened<T>(state_norm, width);
    const auto dn = widened<T>(deep_norm, width), t = widened<T>(table, (kMax + 1) * 2 * width);
    int64_t wrong = 0;
    for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t half = 0; half < 2; ++half) {
            const bool fed = half == 0 || (far[row] > 0 && at[row] >= 0), known = half == 0 || at[row] < kDeep || !fed;
            const float* x = half == 0 ? s.data() + row * width : d.data() + (fed && known ? at[row] * width : 0);
            double squares = 0.0;
            for (int64_t k = 0; k < width; ++k) squares += double(x[k]) * x[k];
            const double factor = fed ? 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-5) : 0.0;
            for (int64_t k = 0; k < width; ++k) {
                const double normed = x[k] * factor * (half == 0 ? sn : dn)[k];
                const double more = t[(std::min(far[row], kMax) * 2 + half) * width + k];
                const float mine = got[(row * 2 + half) * width + k];
                const double error = epsilon<T>() * (2.0 * std::fabs(normed) + std::fabs(normed + more));
                wrong += known ? !(std::fabs(mine - (normed + more)) <= error + 1e-6) : !std::isnan(mine);
            }
        }
        run(row, 1, one);
        const auto alone = widened<T>(one, 2 * width);
        const bool same = std::equal(alone.begin(), alone.end(), got.begin() + row * 2 * width,
                                     [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); });
        expect(same, name + ": another result alone");
    }
    expect(wrong == 0, name + ": " + std::to_string(wrong) + " wrong");
}

template <typename T>
void check_type() {
    for (const int64_t width : {1, 7, 2048, 2049, 49152, 128256}) check_peak<T>(width);
    check_router<T>(1, 1);
    check_router<T>(33, 5);
    check_router<T>(576, 128);
    check_router<T>(4096, 128);
    check_router<T>(5000, 130);
    for (const int64_t width : {1, 7, 576, 4096, 9001}) check_exit_input<T>(width);
}

}  // namespace

void check_small() {
    check_type<__nv_bfloat16>();
    check_type<__half>();
    check_type<float>();
}

}  // namespace tide::cuda::bench
