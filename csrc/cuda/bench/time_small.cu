// How long the ops around the exits take, one after another in captured graphs.
#include "cuda/bench/support.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda::bench {
namespace {

constexpr int kLaunches = 48;
using T = __nv_bfloat16;

void report(const char* op, int64_t rows, int64_t width, const std::function<void(cudaStream_t)>& enqueue) {
    const double us = time_graph(kLaunches, [&](int, cudaStream_t stream) { enqueue(stream); });
    std::printf("{\"op\": \"%s\", \"rows\": %ld, \"width\": %ld, \"us\": %.2f}\n", op, rows, width, us);
    std::fflush(stdout);
}

}  // namespace

void time_small(const Buffer& arena) {
    constexpr int64_t kMostRows = 256, kMostWidth = 128256, kBottleneck = 128, kWeights = 64 << 20;
    const Buffer counters(kMostRows * 4), partials(int64_t{16} << 20), results(int64_t{1} << 24), ids(kMostRows * 8);
    counters.fill_bytes(0);
    ids.put(std::vector<int64_t>(kMostRows, 1));
    const T* x = arena.get<T>();
    const float* weights = reinterpret_cast<const float*>(arena.get<char>() + kMostRows * kMostWidth * 2);
    float* out = results.get<float>();
    for (const int64_t width : {49152, 128256}) {
        for (const int64_t rows : {1, 8, 64}) {
            report("peak", rows, width, [&](cudaStream_t stream) {
                top2_logsumexp(DType::kBFloat16,
                               {x, out, ids.get<int64_t>(), out + 1024, out + 2048, partials.get(),
                                counters.get<uint32_t>(), nullptr, rows, width, width},
                               stream);
            });
            ids.put(std::vector<int64_t>(kMostRows, 1));
        }
    }
    for (const int64_t width : {576, 4096}) {
        for (const int64_t rows : {1, 4, 8, 32, 64, 128, 256}) {
            RouterParams p = {};
            p.features = x;
            p.best = weights;
            p.second = weights + kMostRows;
            p.sum = weights + 2 * kMostRows;
            p.norm = weights;
            p.down = weights + 8192;
            p.down_bias = weights;
            p.out = weights;
            p.out_bias = weights;
            p.scores = out;
            p.partials = partials.get<float>();
            p.counters = counters.get<uint32_t>();
            p.rows = rows;
            p.width = width;
            p.features_stride = width;
            p.bottleneck = kBottleneck;
            p.eps = 1e-5f;
            report("router", rows, width, [&](cudaStream_t stream) { router(DType::kBFloat16, p, stream); });
        }
        for (const int64_t rows : {1, 8}) {
            const T* deep = x + kWeights / 2;
            report("exit_input", rows, width, [&](cudaStream_t stream) {
                exit_input(DType::kBFloat16,
                           {x, x, deep, x, x, ids.get<int64_t>(), ids.get<int64_t>(), out, nullptr, rows, width, 8, 8,
                            width, width, 2 * width, 1e-5f},
                           stream);
            });
            report("embed", rows, width, [&](cudaStream_t stream) {
                gather_rows(DType::kBFloat16, {x, out, ids.get<int64_t>(), nullptr, rows, 49152, width, width, width},
                            stream);
            });
            report("rms_norm", rows, width, [&](cudaStream_t stream) {
                rms_norm(DType::kBFloat16, {x, x, out, nullptr, nullptr, rows, width, width, width, 1e-5f}, stream);
            });
        }
    }
}

}  // namespace tide::cuda::bench
