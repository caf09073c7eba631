// Times every tile of the linear for many rows, on the linears of an 8B and of a 7.25B.
//   wide_bench [ROWS ...] [-TILE ...]   rows of x; 32 64 96 128 192 256 if none are given; -/3 leaves out each tile
//                                       that has /3 in its name
// Standard output: a JSON line for each case and tile. Standard error: for each case the tile that is chosen beside the
// three best, with the share of the floor (bytes of weight, x and y at the rate at which the H200 reads, or products at
// the rate at which it multiplies); then the four linears of a layer in a chain, with the tiles that are chosen and
// with the best of each. `other` counts tiles whose bits are not those of mma.sync.
#include <algorithm>
#include <cstring>

#include "cuda/bench/support.cuh"

namespace tide::cuda::bench {
namespace {

using T = __nv_bfloat16;
constexpr double kReadBytesPerUs = 4.57e6, kProductsPerUs = 790e6 / 2;
constexpr int64_t kMoreThanCache = int64_t{256} << 20;
constexpr int64_t kMostRows = 1024, kMostWidth = 14336;
constexpr int kLayers = 4;

struct WideWay {
    std::string name;
    int tokens;  // rows of x of a CTA
    std::function<void(const LinearParams&, cudaStream_t)> run;
};
using WideWays = std::vector<WideWay>;

struct Shape {
    const char* name;
    int64_t n, k;
    bool gated;

    int64_t rows() const { return gated ? 2 * n : n; }
    int64_t bytes() const { return rows() * k * 2; }
};
struct Model {
    const char* name;
    Shape shapes[4];
};
constexpr Model kModels[] = {{"8B",
                              {{"qkv", 6144, 4096, false},
                               {"o", 4096, 4096, false},
                               {"gate up", 14336, 4096, true},
                               {"down", 4096, 14336, false}}},
                             {"7.25B",
                              {{"qkv", 7680, 4608, false},
                               {"o", 4608, 4608, false},
                               {"gate up", 12288, 4608, true},
                               {"down", 4608, 12288, false}}}};

struct Memory {
    Buffer weights{int64_t{2} << 30};
    Buffer x{kMostRows * kMostWidth * 2}, y{kMostRows * kMostWidth * 2}, expected{kMostRows * kMostWidth * 2};
};

LinearParams params_of(const Shape& s, int64_t rows, const void* x, const void* weight, void* y) {
    LinearParams p = {};
    p.rows = rows;
    p.x = x;
    p.weight = weight;
    p.y = y;
    p.in_features = p.x_stride = s.k;
    p.out_features = p.y_stride = s.n;
    p.gated = s.gated;
    return p;
}

WideWays all_ways() {
    WideWays found;
    for (const WideTile& tile : kWideLinearTiles) {
        if (tile.persistent) continue;
        found.push_back({name_of(tile).substr(5), tile.tokens, [tile](const LinearParams& p, cudaStream_t stream) {
                             launch_linear_wide<T>(p, tile, stream);
                         }});
    }
    return found;
}

WideWay chosen_way() {
    return {"chosen", 0, [](const LinearParams& p, cudaStream_t stream) { linear(DType::kBFloat16, p, stream); }};
}

struct Time {
    double us;
    WideWay way;
};

// The best tile.
Time time_shape(const Model& model, const Shape& s, int64_t rows, const WideWays& ways, const Memory& memory) {
    LinearParams p = params_of(s, rows, memory.x.get(), memory.weights.get(), memory.expected.get());
    launch_linear_tiles<T, false>(p, {2, 8, 1, true}, nullptr);
    require(cudaDeviceSynchronize());
    const size_t y_bytes = static_cast<size_t>(rows * s.n * 2);
    std::vector<char> expected(y_bytes), ours(y_bytes);
    require(cudaMemcpy(expected.data(), memory.expected.get(), y_bytes, cudaMemcpyDeviceToHost));
    p.y = memory.y.get();
    const int64_t copies = std::max<int64_t>(1, kMoreThanCache / s.bytes() + 1);
    const int launches = static_cast<int>(std::max<int64_t>(12, copies));
    const double bytes = static_cast<double>(s.bytes() + rows * (s.k + s.n) * 2);
    const double products = static_cast<double>(rows * s.rows()) * static_cast<double>(s.k);
    const double floor = std::max(bytes / kReadBytesPerUs, products / kProductsPerUs);
    int other = 0;
    const auto measure = [&](const WideWay& v) {
        const double us = time_graph(launches, [&](int i, cudaStream_t stream) {
            p.weight = memory.weights.get<char>() + i % copies * s.bytes();
            v.run(p, stream);
        });
        p.weight = memory.weights.get();
        require(cudaMemset(memory.y.get(), 0x7f, y_bytes));
        v.run(p, nullptr);
        require(cudaDeviceSynchronize());
        require(cudaMemcpy(ours.data(), memory.y.get(), y_bytes, cudaMemcpyDeviceToHost));
        const bool same = std::memcmp(ours.data(), expected.data(), y_bytes) == 0;
        other += !same;
        std::printf(
            "{\"model\": \"%s\", \"case\": \"%s\", \"rows\": %ld, \"tile\": \"%s\", \"us\": %.2f, \"floor\": %.2f, "
            "\"same_bits\": %d}\n",
            model.name, s.name, rows, v.name.c_str(), us, floor, same);
        std::fflush(stdout);
        return Time{us, v};
    };
    const DeviceInfo device = current_device("bench");
    const Time chosen = measure(chosen_way());
    std::vector<Time> times;
    for (const WideWay& v : ways) {
        if (v.tokens >= std::min<int64_t>(rows, 64) && v.tokens < 2 * rows) times.push_back(measure(v));
    }
    std::sort(times.begin(), times.end(), [](const Time& a, const Time& b) { return a.us < b.us; });
    std::fprintf(stderr, "%-6s %-8s %4ld floor %6.2f %-15s %7.2f %5.1f%% best", model.name, s.name, rows, floor,
                 name_of_chosen(p, device).c_str(), chosen.us, 100 * floor / chosen.us);
    for (size_t i = 0; i < std::min<size_t>(3, times.size()); ++i)
        std::fprintf(stderr, "  %-12s %7.2f", times[i].way.name.c_str(), times[i].us);
    std::fprintf(stderr, " other %d\n", other);
    return times[0];
}

// Of a layer: the linears one after another, each of which reads what the one before it wrote.
double time_layer(const Model& model, int64_t rows, const WideWays& ways, const Memory& memory) {
    const double us = time_graph(1, [&](int, cudaStream_t stream) {
        const char* weight = memory.weights.get<char>();
        const void* x = memory.x.get();
        void *y = memory.y.get(), *next = memory.expected.get();
        for (int layer = 0; layer < kLayers; ++layer) {
            for (int i = 0; i < 4; ++i) {
                const Shape& s = model.shapes[i];
                LinearParams p = params_of(s, rows, x, weight, y);
                if (i == 1) p.x_stride = model.shapes[0].n;  // as much of its rows as attention leaves
                ways[i].run(p, stream);
                weight += s.bytes();
                x = y;
                std::swap(y, next);
            }
        }
    });
    return us / kLayers;
}

}  // namespace
}  // namespace tide::cuda::bench

int main(int argc, char** argv) {
    using namespace tide::cuda;
    using namespace tide::cuda::bench;
    std::vector<int64_t> counts;
    WideWays ways = all_ways();
    for (int i = 1; i < argc; ++i) {
        if (argv[i][0] != '-') {
            counts.push_back(std::strtol(argv[i], nullptr, 10));
            continue;
        }
        const auto is_out = [&](const WideWay& way) { return way.name.find(argv[i] + 1) != std::string::npos; };
        ways.erase(std::remove_if(ways.begin(), ways.end(), is_out), ways.end());
    }
    if (counts.empty()) counts = {32, 64, 96, 128, 192, 256};
    for (const int64_t rows : counts) {
        if (rows < 17 || rows > kMostRows) {
            std::fprintf(stderr, "rows: got %ld, expected 17 to %ld\n", rows, kMostRows);
            return 1;
        }
    }
    const Memory memory;
    fill(memory.weights.get<__nv_bfloat16>(), memory.weights.bytes() / 2, 4, 0.02f);
    fill(memory.x.get<__nv_bfloat16>(), kMostRows * kMostWidth, 5, 1.0f);
    for (const Model& model : kModels) {
        for (const int64_t rows : counts) {
            WideWays best;
            for (const Shape& s : model.shapes) best.push_back(time_shape(model, s, rows, ways, memory).way);
            const double now = time_layer(model, rows, WideWays(4, chosen_way()), memory);
            const double then = time_layer(model, rows, best, memory);
            std::printf("{\"model\": \"%s\", \"case\": \"layer\", \"rows\": %ld, \"chosen\": %.2f, \"best\": %.2f}\n",
                        model.name, rows, now, then);
            std::fprintf(stderr, "%-6s layer    %4ld chosen %7.2f best %7.2f\n", model.name, rows, now, then);
        }
    }
}
