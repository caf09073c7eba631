// When an LM head should go the way of many rows. One JSON line a case.
#include "cuda/bench/support.cuh"
#include "cuda/linear/kernels.h"

namespace tide::cuda::bench {
namespace {

using T = __nv_bfloat16;
constexpr int kLaunches = 12;
constexpr int64_t kMostRows = 64;

struct HeadShape {
    const char* name;
    int64_t n, k;
};

}  // namespace

void time_head(const Buffer& arena) {
    const HeadShape shapes[] = {{"8b", 128256, 4096}, {"demo", 49152, 576}, {"8b shortlist", 16384, 4096}};
    for (const HeadShape& s : shapes) {
        const Buffer x(kMostRows * s.k * 2), y(kMostRows * s.n * 2);
        fill(x.get<T>(), kMostRows * s.k, 5, 1.0f);
        const int64_t bytes = s.n * s.k * 2, copies = arena.bytes() / bytes;
        for (const int64_t rows : {1, 4, 5, 8, 10, 16, 24, 32, 48, 64}) {
            LinearParams p = {};
            p.x = x.get();
            p.y = y.get();
            p.rows = rows;
            p.in_features = p.x_stride = s.k;
            p.out_features = p.y_stride = s.n;
            p.weight = arena.get();
            const DeviceInfo device = current_device("bench");
            const std::string chosen = name_of_chosen(p, device);
            const auto report = [&](const std::string& tile, auto&& run) {
                const double us = time_graph(kLaunches, [&](int i, cudaStream_t stream) {
                    p.weight = arena.get<char>() + i % copies * bytes;
                    run(stream);
                });
                std::printf(
                    "{\"op\": \"head\", \"case\": \"%s\", \"rows\": %ld, \"tile\": \"%s\", \"chosen\": %d, \"us\": "
                    "%.2f, \"gb_s\": %.0f}\n",
                    s.name, rows, tile.c_str(), tile == chosen, us, static_cast<double>(bytes) / us * 1e-3);
                std::fflush(stdout);
            };
            const LinearTile tile = choose_tile(p, device);
            report(name_of(tile), [&](cudaStream_t stream) { launch_tiles<T>(p, tile, stream); });
            if (!supports_wide(p, device)) continue;
            for (const WideTile& wide : wide_tiles(p)) {
                if (wide.tokens > (rows > 32 ? 64 : 32) || wide.split > 1) continue;
                report(name_of(wide), [&](cudaStream_t stream) { launch_linear_wide<T>(p, wide, stream); });
            }
        }
    }
}

}  // namespace tide::cuda::bench
