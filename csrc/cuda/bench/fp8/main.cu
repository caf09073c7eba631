// Times every way to run a linear of E4M3 weights that is built, on the linears of an 8B and of a 70B.
//   fp8_bench [chosen] [ROWS ...]   rows of x; 1 8 32 64 128 if none are given; `chosen`: none but the chosen ways
// Standard output: a JSON line for each case and way. Standard error: for each case the tile that is chosen beside the
// best one, with the share of the floor (bytes of weight, scales, x and y at the rate at which the H200 reads), and
// bfloat16 in the tile that is chosen there. `other` counts ways whose bits are not those of bfloat16.
#include <algorithm>
#include <cstring>

#include "cuda/bench/fp8/variants.h"
#include "cuda/bench/support.cuh"
#include "cuda/linear/widen.cuh"

namespace tide::cuda::bench {
namespace {

using T = __nv_bfloat16;
constexpr double kReadBytesPerUs = 4.57e6;
constexpr int64_t kMoreThanCache = int64_t{256} << 20;
constexpr int64_t kMostRows = 128, kMostWidth = 28672;

struct Shape {
    const char* name;
    int64_t n, k;
    bool gated;

    int64_t rows() const { return gated ? 2 * n : n; }
    int64_t bytes() const { return rows() * k; }
};

__global__ void fill_codes(uint32_t* to, int64_t count) {  // none of which is NaN
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
        uint64_t v = (i + 1) * 0x9E3779B97F4A7C15ull;
        v = (v ^ v >> 29) * 0xBF58476D1CE4E5B9ull;
        to[i] = static_cast<uint32_t>(v >> 32) & 0xfefefefeu;
    }
}
__global__ void fill_scales(float* to, int64_t count, bool in_bfloat16) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
        const float scale = (noise(i, 3) + 1.5f) * 1e-4f;
        to[i] = in_bfloat16 ? round_to<T>(scale) : scale;
    }
}

struct Memory {
    Buffer weights{int64_t{5} << 28}, wide{int64_t{9} << 28}, scales{int64_t{1} << 22};
    Buffer x{kMostRows * kMostWidth * 2}, y{kMostRows * kMostWidth * 2}, expected{kMostRows * kMostWidth * 2};
};

template <typename Params>
Variants<Params> all_variants(const LinearParams& p) {
    Variants<Params> found;
    for (const LinearTile& tile : kLinearTiles) {
        if (!has_kernel(tile, false, true)) continue;
        found.push_back({name_of(tile), tile.token_tiles * 8, [tile](const Params& q, cudaStream_t stream) {
                             launch_linear_tiles<T, false>(q, tile, stream);
                         }});
    }
    add_staged(found);
    for (const WideTile& tile : wide_tiles(p, true)) {
        found.push_back({name_of(tile), tile.tokens,
                         [tile](const Params& q, cudaStream_t stream) { launch_linear_wide<T>(q, tile, stream); }});
    }
    add_thin<8>(found);
    add_thin<16>(found);
    add_thin<32>(found);
    add_thin<64>(found);
    return found;
}

template <typename Params>
void time_shape(const Shape& s, bool blocks, bool all_ways, const std::vector<int64_t>& counts, const Memory& memory) {
    constexpr bool kDealt = kIsDealt<Params>;
    const std::string kind = std::string(kDealt ? "dealt" : "bytes") + (blocks ? ", blocks" : ", rows");
    Params p = {};
    p.x = memory.x.get();
    p.y = memory.y.get();
    p.in_features = p.x_stride = s.k;
    p.out_features = p.y_stride = s.n;
    p.gated = s.gated;
    p.weight = memory.weights.get();
    p.scales = memory.scales.get<float>();
    p.block_rows = blocks ? 128 : 1;
    p.scale_shift = blocks ? 7 : kWholeRows;
    p.scale_stride = blocks ? s.k / 128 : 1;
    const int64_t num_scales = (s.rows() + p.block_rows - 1) / p.block_rows * p.scale_stride;
    fill_scales<<<256, 256>>>(memory.scales.get<float>(), num_scales, kDealt);
    Fp8LinearParams matrix = p;
    matrix.y = memory.wide.get();
    matrix.out_features = s.rows();
    launch_widen_fp8(matrix, kDealt, nullptr);
    require(cudaDeviceSynchronize());
    const DeviceInfo device = current_device("bench");
    const int64_t copies = std::max<int64_t>(1, std::min<int64_t>(64, kMoreThanCache / s.bytes() + 1));
    const int launches = static_cast<int>(std::max<int64_t>(16, copies));
    for (const int64_t rows : counts) {
        p.rows = rows;
        const auto time = [&](int64_t bytes, const auto& run) {
            return time_graph(launches, [&](int i, cudaStream_t stream) { run(i % copies * bytes, stream); });
        };
        LinearParams plain = p;
        plain.y = memory.expected.get();
        const double half_us = time(2 * s.bytes(), [&](int64_t offset, cudaStream_t stream) {
            plain.weight = memory.wide.get<char>() + offset % (memory.wide.bytes() - 2 * s.bytes() + 1) / 256 * 256;
            linear(DType::kBFloat16, plain, stream);
        });
        plain.weight = memory.wide.get();
        linear(DType::kBFloat16, plain, nullptr);
        require(cudaDeviceSynchronize());
        const size_t y_bytes = static_cast<size_t>(rows * s.n * 2);
        std::vector<char> expected(y_bytes), ours(y_bytes);
        require(cudaMemcpy(expected.data(), memory.expected.get(), y_bytes, cudaMemcpyDeviceToHost));
        const double floor = static_cast<double>(s.bytes() + num_scales * 4 + rows * (s.k + s.n) * 2) / kReadBytesPerUs;
        std::string best_name;
        double best = 1e30;
        int other = 0;
        const auto report = [&](const Variant<Params>& v) {
            const double us = time(s.bytes(), [&](int64_t offset, cudaStream_t stream) {
                p.weight = memory.weights.get<char>() + offset;
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
                "{\"case\": \"%s\", \"kind\": \"%s\", \"rows\": %ld, \"way\": \"%s\", \"us\": %.2f, \"floor\": %.2f, "
                "\"same_bits\": %d}\n",
                s.name, kind.c_str(), rows, v.name.c_str(), us, floor, same);
            std::fflush(stdout);
            if (us < best && v.name != "chosen") {
                best = us;
                best_name = v.name;
            }
            return us;
        };
        const double chosen =
            report({"chosen", 0, [](const Params& q, cudaStream_t stream) { fp8_linear(q, kDealt, stream); }});
        const std::string chosen_name = name_of_chosen(p, device);
        for (const Variant<Params>& v : all_variants<Params>(p)) {
            const bool fits = v.tokens >= std::min<int64_t>(rows, 64) && v.tokens <= std::max<int64_t>(8, 2 * rows - 1);
            if (fits && all_ways) report(v);
        }
        if (best_name.empty()) best = chosen;
        std::fprintf(stderr, "%-12s %4ld %-14s %5.1f%% %7.2f %-18s best %5.1f%% %7.2f %-18s bf16 %7.2f other %d\n",
                     s.name, rows, kind.c_str(), 100 * floor / chosen, chosen, chosen_name.c_str(), 100 * floor / best,
                     best, best_name.c_str(), half_us, other);
    }
}

}  // namespace
}  // namespace tide::cuda::bench

int main(int argc, char** argv) {
    using namespace tide::cuda;
    using namespace tide::cuda::bench;
    std::vector<int64_t> counts;
    const bool all_ways = argc < 2 || std::strcmp(argv[1], "chosen") != 0;
    for (int i = all_ways ? 1 : 2; i < argc; ++i) counts.push_back(std::strtol(argv[i], nullptr, 10));
    if (counts.empty()) counts = {1, 8, 32, 64, 128};
    const Memory memory;
    fill_codes<<<1024, 256>>>(memory.weights.get<uint32_t>(), memory.weights.bytes() / 4);
    fill(memory.x.get<__nv_bfloat16>(), kMostRows * kMostWidth, 5, 1.0f);
    const Shape shapes[] = {{"8B qkv", 6144, 4096, false},      {"8B o", 4096, 4096, false},
                            {"8B gate up", 14336, 4096, true},  {"8B down", 4096, 14336, false},
                            {"70B qkv", 10240, 8192, false},    {"70B o", 8192, 8192, false},
                            {"70B gate up", 28672, 8192, true}, {"70B down", 8192, 28672, false}};
    for (const Shape& s : shapes) {
        time_shape<DealtFp8LinearParams>(s, false, all_ways, counts, memory);
        time_shape<Fp8LinearParams>(s, true, all_ways, counts, memory);
        time_shape<DealtFp8LinearParams>(s, true, all_ways, counts, memory);
    }
}
