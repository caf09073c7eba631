// How fast the ops are, in captured graphs, over more memory than the second-level cache holds. One JSON line a case.
#include <algorithm>

#include "cuda/bench/support.cuh"
#include "cuda/linear/kernels.h"
#include "cuda/small/ops.h"

namespace tide::cuda::bench {
namespace {

constexpr int64_t kMoreThanCache = int64_t{512} << 20;
constexpr int kLaunches = 24;
constexpr int64_t kMostRows = 1024, kMostWidth = 14336, kMostColumns = 128256;
using T = __nv_bfloat16;

struct LinearShape {
    const char* name;
    int64_t n, k;
    bool gated;
    bool sweep;  // every tile, not only the chosen one

    int64_t weight_bytes() const { return (gated ? 2 * n : n) * k * 2; }
};

const LinearShape kQkv = {"qkv", 6144, 4096, false, true}, kOut = {"o", 4096, 4096, false, true};
const LinearShape kGated = {"gated", 14336, 4096, true, true}, kDown = {"down", 4096, 14336, false, true};
const LinearShape kHead = {"head", 128256, 4096, false, true};

LinearParams params_of(const LinearShape& s, const void* x, int64_t x_stride, const void* weight, void* y,
                       int64_t rows) {
    LinearParams p = {};
    p.x = x;
    p.weight = weight;
    p.y = y;
    p.rows = rows;
    p.in_features = s.k;
    p.out_features = s.n;
    p.x_stride = x_stride;
    p.y_stride = s.n;
    p.residual_stride = s.n;
    p.gated = s.gated;
    return p;
}

}  // namespace

void time_linear(const Buffer& arena) {
    const LinearShape shapes[] = {kQkv,
                                  kOut,
                                  kGated,
                                  kDown,
                                  kHead,
                                  {"demo qkv", 960, 576, false, false},
                                  {"demo o", 576, 576, false, false},
                                  {"demo gated", 1536, 576, true, false},
                                  {"demo down", 576, 1536, false, false},
                                  {"demo head", 49152, 576, false, true},
                                  {"narrow head", 4096, 576, false, false},
                                  {"narrow head", 16384, 4096, false, false}};
    const Buffer x(kMostRows * kMostWidth * 2), y(kMostRows * kMostColumns * 2), norm(kMostWidth * 2);
    fill(x.get<T>(), kMostRows * kMostWidth, 5, 1.0f);
    fill(norm.get<T>(), kMostWidth, 10, 1.0f);
    const DeviceInfo device = current_device("bench");
    for (const LinearShape& s : shapes) {
        const int64_t bytes = (s.weight_bytes() + 255) / 256 * 256;
        const int64_t copies = std::max<int64_t>(1, std::min(arena.bytes(), kMoreThanCache) / bytes);
        const auto weight = [&](int i) { return arena.get<char>() + i % copies * bytes; };
        // A graph goes over all the copies, so that a replay does not find the first ones in the cache.
        const int launches = static_cast<int>(std::max<int64_t>(kLaunches, std::min<int64_t>(copies, 400)));
        using Run = std::function<void(const LinearParams&, cudaStream_t)>;
        const auto report = [&](int64_t rows, const std::string& tile, bool chosen, bool normed, const Run& run) {
            const double us = time_graph(rows > 64 ? kLaunches : launches, [&](int i, cudaStream_t stream) {
                LinearParams p = params_of(s, x.get(), s.k, weight(i), y.get(), rows);
                p.norm = normed ? norm.get() : nullptr;
                run(p, stream);
            });
            const double total = static_cast<double>(s.weight_bytes() + rows * (s.k + s.n) * 2);
            std::printf(
                "{\"op\": \"linear\", \"case\": \"%s\", \"n\": %ld, \"k\": %ld, \"gated\": %d, \"norm\": %d, "
                "\"rows\": %ld, \"tile\": \"%s\", \"chosen\": %d, \"us\": %.2f, \"gb_s\": %.0f, \"share\": %.3f}\n",
                s.name, s.n, s.k, s.gated, normed, rows, tile.c_str(), chosen, us, total / us * 1e-3,
                total / us / kPeakBytesPerUs);
            std::fflush(stdout);
        };
        const Run chosen = [](const LinearParams& p, cudaStream_t stream) { linear(DType::kBFloat16, p, stream); };
        for (const int64_t rows : {1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 1024}) {
            LinearParams p = params_of(s, x.get(), s.k, weight(0), y.get(), rows);
            const std::string best = name_of_chosen(p, device);
            report(rows, best, true, false, chosen);
            if (rows <= 64) {
                p.norm = norm.get();
                report(rows, name_of_chosen(p, device), true, true, chosen);
                p.norm = nullptr;
            }
            if (!s.sweep || rows == 2 || rows == 4) continue;
            for (const LinearTile& tile : kLinearTiles) {
                const int64_t tokens = tile.token_tiles * 8;
                if (!has_kernel(tile, false, false) || name_of(tile) == best || (tokens > 8 && tokens >= 2 * rows) ||
                    tokens < std::min<int64_t>(rows, 64))
                    continue;
                report(rows, name_of(tile), false, false,
                       [&](const LinearParams& q, cudaStream_t stream) { launch_tiles<T>(q, tile, stream); });
            }
            if (rows <= 8 || !supports_wide(p, device)) continue;
            for (const WideTile& tile : wide_tiles(p)) {
                if (name_of(tile) == best || tile.tokens >= 2 * rows || tile.tokens * 4 < rows) continue;
                report(rows, name_of(tile), false, false,
                       [&](const LinearParams& q, cudaStream_t stream) { launch_linear_wide<T>(q, tile, stream); });
            }
        }
    }
}

void time_chain(const Buffer& arena) {
    constexpr int kLayers = 32;
    const int64_t layer_bytes =
        kQkv.weight_bytes() + kOut.weight_bytes() + kGated.weight_bytes() + kDown.weight_bytes();
    const int64_t total = kLayers * layer_bytes + kHead.weight_bytes();
    if (arena.bytes() < total) return;
    const Buffer hidden(kMostRows * 4096 * 2), qkv(kMostRows * 6144 * 2), act(kMostRows * 14336 * 2);
    const Buffer logits(kMostRows * 128256 * 2);
    const Buffer normed(kMostRows * 4096 * 2), norm(int64_t{4096} * 2);
    fill(norm.get<T>(), 4096, 10, 1.0f);
    enum Norms { kNoNorms, kApart, kFused };
    const char* names[] = {"none", "apart", "fused"};
    const auto time = [&](int64_t rows, Norms norms) {
        fill(hidden.get<T>(), kMostRows * 4096, 6, 1.0f);
        const double us = time_graph(1, [&](int, cudaStream_t stream) {
            const char* weight = arena.get<char>();
            const auto step = [&](const LinearShape& s, const Buffer& x, int64_t x_stride, const Buffer& y, bool add) {
                LinearParams p = params_of(s, x.get(), x_stride, weight, y.get(), rows);
                if (add) p.residual = y.get();
                if (!add && norms == kFused) p.norm = norm.get();
                if (!add && norms == kApart) {
                    const RmsNormParams n = {x.get(), norm.get(), normed.get(), rows, s.k, x_stride, s.k, 1e-5f};
                    rms_norm(DType::kBFloat16, n, stream);
                    p.x = normed.get();
                    p.x_stride = s.k;
                }
                linear(DType::kBFloat16, p, stream);
                weight += s.weight_bytes();
            };
            for (int layer = 0; layer < kLayers; ++layer) {
                step(kQkv, hidden, 4096, qkv, false);
                step(kOut, qkv, 6144, hidden, true);
                step(kGated, hidden, 4096, act, false);
                step(kDown, act, 14336, hidden, true);
            }
            step(kHead, hidden, 4096, logits, false);
        });
        std::printf(
            "{\"op\": \"chain\", \"norms\": \"%s\", \"rows\": %ld, \"ms\": %.3f, \"gb\": %.2f, \"share\": %.3f}\n",
            names[norms], rows, us * 1e-3, static_cast<double>(total) * 1e-9,
            static_cast<double>(total) / us / kPeakBytesPerUs);
        std::fflush(stdout);
    };
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
        for (const Norms norms : {kNoNorms, kApart, kFused}) {
            if (rows <= 64 || norms != kFused) time(rows, norms);
        }
    }
}

}  // namespace tide::cuda::bench
