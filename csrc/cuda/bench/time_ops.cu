// How fast the ops are, in captured graphs, over more memory than the second-level cache holds. One JSON line a case.
#include <algorithm>

#include "cuda/bench/support.cuh"
#include "cuda/linear_tiles.h"
#include "cuda/small_ops.h"

namespace tide::cuda::bench {
namespace {

constexpr int64_t kMoreThanCache = int64_t{512} << 20;
constexpr int kLaunches = 24;
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
    const Buffer x(int64_t{64} * 14336 * 2), y(int64_t{64} * 128256 * 2);
    const Buffer norm(int64_t{14336} * 2);
    fill(x.get<T>(), int64_t{64} * 14336, 5, 1.0f);
    fill(norm.get<T>(), 14336, 10, 1.0f);
    for (const LinearShape& s : shapes) {
        const int64_t bytes = (s.weight_bytes() + 255) / 256 * 256;
        const int64_t copies = std::max<int64_t>(1, std::min(arena.bytes(), kMoreThanCache) / bytes);
        const auto weight = [&](int i) { return arena.get<char>() + i % copies * bytes; };
        // A graph goes over all the copies, so that a replay does not find the first ones in the cache.
        const int launches = static_cast<int>(std::max<int64_t>(kLaunches, std::min<int64_t>(copies, 400)));
        const auto report = [&](int64_t rows, const LinearTile& tile, bool chosen, bool normed) {
            const double us = time_graph(launches, [&](int i, cudaStream_t stream) {
                LinearParams p = params_of(s, x.get(), s.k, weight(i), y.get(), rows);
                p.norm = normed ? norm.get() : nullptr;
                if (chosen) return linear(DType::kBFloat16, p, stream);
                launch_tiles<T>(p, tile, stream);
            });
            const double total = static_cast<double>(s.weight_bytes() + rows * (s.k + s.n) * 2);
            std::printf(
                "{\"op\": \"linear\", \"case\": \"%s\", \"n\": %ld, \"k\": %ld, \"gated\": %d, \"norm\": %d, "
                "\"rows\": %ld, \"tile\": \"%s\", \"chosen\": %d, \"us\": %.2f, \"gb_s\": %.0f, \"share\": %.3f}\n",
                s.name, s.n, s.k, s.gated, normed, rows, name_of(tile).c_str(), chosen, us, total / us * 1e-3,
                total / us / kPeakBytesPerUs);
            std::fflush(stdout);
        };
        const DeviceInfo device = current_device("bench");
        for (const int64_t rows : {1, 2, 4, 8, 16, 24, 32, 64}) {
            LinearParams p = params_of(s, x.get(), s.k, weight(0), y.get(), rows);
            const LinearTile best = choose_tile(p, device);
            report(rows, best, true, false);
            p.norm = norm.get();
            report(rows, choose_tile(p, device), true, true);
            if (!s.sweep || rows == 2 || rows == 4) continue;
            std::vector<LinearTile> others;
            if (rows <= 8) others = {{1, 1}, {2, 1}};
            for (const int row_tiles : {1, 2, 3, 4}) {
                if (row_tiles < 4 || rows < 64) others.push_back({row_tiles, best.token_tiles, 1, true});
            }
            if (rows > 8) {
                others.push_back({4, best.token_tiles, 2, true});
                if (s.n <= 8192) {
                    for (const int row_tiles : {2, 3}) others.push_back({row_tiles, best.token_tiles, 1, true, true});
                    others.push_back({4, best.token_tiles, 2, true, true});
                }
            }
            for (const LinearTile& tile : others) {
                if (name_of(tile) != name_of(best)) report(rows, tile, false, false);
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
    const Buffer hidden(int64_t{64} * 4096 * 2), qkv(int64_t{64} * 6144 * 2), act(int64_t{64} * 14336 * 2);
    const Buffer logits(int64_t{64} * 128256 * 2);
    const Buffer normed(int64_t{64} * 4096 * 2), norm(int64_t{4096} * 2);
    fill(norm.get<T>(), 4096, 10, 1.0f);
    enum Norms { kNoNorms, kApart, kFused };
    const char* names[] = {"none", "apart", "fused"};
    const auto time = [&](int64_t rows, Norms norms) {
        fill(hidden.get<T>(), int64_t{64} * 4096, 6, 1.0f);
        const double us = time_graph(1, [&](int, cudaStream_t stream) {
            const char* weight = arena.get<char>();
            const auto step = [&](const LinearShape& s, const Buffer& x, int64_t x_stride, const Buffer& y, bool add) {
                LinearParams p = params_of(s, x.get(), x_stride, weight, y.get(), rows);
                if (add) p.residual = y.get();
                if (!add && norms == kFused) p.norm = norm.get();
                if (!add && norms == kApart) {
                    const RmsNormParams n = {x.get(), norm.get(), normed.get(), nullptr, nullptr,
                                             rows,    s.k,        x_stride,     s.k,     1e-5f};
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
    for (const int64_t rows : {1, 8, 32}) {
        for (const Norms norms : {kNoNorms, kApart, kFused}) time(rows, norms);
    }
}

}  // namespace tide::cuda::bench
