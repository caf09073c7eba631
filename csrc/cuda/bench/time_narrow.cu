// Which tile suits the linears of a narrow model, where a launch is a matter of latency. One JSON line a case.
#include "cuda/bench/support.cuh"
#include "cuda/linear/kernels.h"

namespace tide::cuda::bench {
namespace {

using T = __nv_bfloat16;
constexpr int kLaunches = 60;
constexpr int64_t kMostRows = 256, kMostWidth = 1536, kMostColumns = 8192;

struct NarrowShape {
    const char* name;
    int64_t n, k;
    bool gated, normed;
};

}  // namespace

void time_narrow(const Buffer& arena) {
    const NarrowShape shapes[] = {{"qkv", 960, 576, false, true},
                                  {"o", 576, 576, false, false},
                                  {"gated", 1536, 576, true, true},
                                  {"down", 576, 1536, false, false},
                                  {"shortlist", 8192, 576, false, true}};
    const Buffer x(kMostRows * kMostWidth * 2), y(kMostRows * kMostColumns * 2), norm(kMostWidth * 2);
    fill(x.get<T>(), kMostRows * kMostWidth, 5, 1.0f);
    fill(norm.get<T>(), kMostWidth, 10, 1.0f);
    for (const NarrowShape& s : shapes) {
        const int64_t bytes = (s.gated ? 2 : 1) * s.n * s.k * 2;
        const int64_t copies = arena.bytes() / bytes;
        for (const int64_t rows : {1, 8, 12, 16, 24, 32, 48, 64, 128, 256}) {
            LinearParams p = {};
            p.x = x.get();
            p.y = y.get();
            p.norm = s.normed ? norm.get() : nullptr;
            p.rows = rows;
            p.in_features = s.k;
            p.out_features = s.n;
            p.x_stride = s.k;
            p.y_stride = s.n;
            p.gated = s.gated;
            p.weight = arena.get();
            const LinearTile chosen = choose_tile(p, current_device("bench"));
            const auto report = [&](const LinearTile& tile) {
                const double us = time_graph(kLaunches, [&](int i, cudaStream_t stream) {
                    p.weight = arena.get<char>() + i % copies * bytes;
                    launch_tiles<T>(p, tile, stream);
                });
                std::printf(
                    "{\"op\": \"narrow\", \"case\": \"%s\", \"rows\": %ld, \"tile\": \"%s\", \"chosen\": %d, \"us\": "
                    "%.2f}\n",
                    s.name, rows, name_of(tile).c_str(), name_of(tile) == name_of(chosen), us);
                std::fflush(stdout);
            };
            report(chosen);
            for (const LinearTile& tile : kLinearTiles) {
                if (tile.row_tiles > 2 || tile.cluster > 1 || tile.deep || !has_kernel(tile, p.norm, false)) continue;
                if (tile.token_tiles < rows / 4 && name_of(tile) != name_of(chosen)) report(tile);
            }
        }
    }
}

}  // namespace tide::cuda::bench
