// Linears on the model of a GPU's lanes: of E4M3 weights, and of the matrix that they stand for in bfloat16.
//   check KERNEL ROWS IN OUT BLOCK_ROWS SCALE_SHIFT GATED NORMED DEALT
// Prints how many outputs, or numbers of the widened matrix, differ, and by how much at most they are off the products
// in double. lanes.h comes first.
#include "cuda/linear/thin.cuh"
#include "cuda/linear/tiles.cuh"
#include "cuda/linear/wide.cuh"
#include "cuda/linear/widen.cuh"

namespace tide::cuda {

alignas(1024) char shared[kSharedBytes];
extern char memory[kSharedBytes] __attribute__((alias("_ZN4tide4cuda6sharedE")));

}  // namespace tide::cuda

using namespace tide::cuda;
using T = __nv_bfloat16;

static uint64_t state = 1;
static double random_number() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state >> 40) / (1 << 24) * 2 - 1;
}

static float e4m3(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size =
        exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    return code & 128 ? -size : size;
}

template <bool kNormed, typename Params>
static void run(const std::string& kernel, const Params& p) {
    constexpr bool kFp8 = kIsFp8<Params>;
    if (kernel == "1") return launch_tile_of<T, 1, kNormed, false>(p, nullptr);
    if (kernel == "2") return launch_tile_of<T, 2, kNormed, false>(p, nullptr);
    if (kernel == "1short") return launch_tile_of<T, 1, kNormed, true>(p, nullptr);
    if (kernel == "2short") return launch_tile_of<T, 2, kNormed, true>(p, nullptr);
    if (kernel == "2x2") return launch_staged<T, StagedLayout<2, 2, 1, false, kNormed, Params>>(p, nullptr);
    if (kernel == "1x1") return launch_staged<T, StagedLayout<1, 1, 1, false, kNormed, Params>>(p, nullptr);
    if (kernel == "3x1") return launch_staged<T, StagedLayout<3, 1, 1, false, kNormed, Params>>(p, nullptr);
    if (kernel == "4x1") return launch_staged<T, StagedLayout<4, 1, 1, false, kNormed, Params>>(p, nullptr);
    if (kernel == "3x4") return launch_staged<T, StagedLayout<3, 4, 1, true, kNormed, Params>>(p, nullptr);
    if (kernel == "2x8") return launch_staged<T, StagedLayout<2, 8, 1, false, kNormed, Params>>(p, nullptr);
    if constexpr (!kNormed && kFp8) {  // the other one is that of one tile
        constexpr int kRing = 100 * 1024;
        if (kernel == "thin 1x2x8") return launch_thin<T, ThinLayout<1, 2, 1, 8, Params>>(p, kRing, nullptr);
        if (kernel == "thin 1x2x16") return launch_thin<T, ThinLayout<1, 2, 1, 16, Params>>(p, kRing, nullptr);
        if (kernel == "thin 2x1x32") return launch_thin<T, ThinLayout<2, 1, 1, 32, Params>>(p, kRing, nullptr);
        if (kernel == "thin 1x4x32") return launch_thin<T, ThinLayout<1, 4, 1, 32, Params>>(p, 128 * 1024, nullptr);
        if (kernel == "thin 1x2x64") return launch_thin<T, ThinLayout<1, 2, 1, 64, Params>>(p, kRing, nullptr);
    }
    if (kernel.rfind("thin", 0) == 0) return launch_tile_of<T, 1, kNormed, false>(p, nullptr);
    if constexpr (!kNormed) {
        if constexpr (!kFp8) {  // the other one is that of one tile
            if (kernel == "3x64/1") return launch_wide<T, WideLayout<3, 64, 1>>(p, nullptr);
            if (kernel == "3x128/1") return launch_wide<T, WideLayout<3, 128, 1>>(p, nullptr);
            if (kernel == "1x64/2") return launch_wide<T, WideLayout<1, 64, 2>>(p, nullptr);
            if (kernel == "2x64/3") return launch_wide<T, WideLayout<2, 64, 3>>(p, nullptr);
            if (kernel == "2x128/3") return launch_wide<T, WideLayout<2, 128, 3>>(p, nullptr);
            if (kernel == "1x32/2") return launch_wide<T, WideLayout<1, 32, 2>>(p, nullptr);
            if (kernel == "2x32/2") return launch_wide<T, WideLayout<2, 32, 2>>(p, nullptr);
            if (kernel == "2x64/2") return launch_wide<T, WideLayout<2, 64, 2>>(p, nullptr);
        } else if (kernel.find('/') != kernel.npos) {
            return launch_tile_of<T, 1, kNormed, false>(p, nullptr);
        }
        if (kernel == "wide 32") return launch_wide<T, WideLayout<2, 32, 1, Params>>(p, nullptr);
        if (kernel == "wide 64") return launch_wide<T, WideLayout<2, 64, 1, Params>>(p, nullptr);
        if (kernel == "wide 128") return launch_wide<T, WideLayout<2, 128, 1, Params>>(p, nullptr);
    }
    std::abort();
}

// What kernels read 16 columns as: whole numbers in another order, or their bits dealt out.
static void pack(const uint8_t* codes, bool dealt, uint8_t* packed) {
    for (int t = 0; t < 4; ++t) {
        const uint8_t four[] = {codes[2 * t], codes[2 * t + 1], codes[2 * t + 8], codes[2 * t + 9]};
        if (!dealt) std::memcpy(packed + 4 * t, four, 4);
        for (int i = 0; dealt && i < 2; ++i) {
            const int first = four[i], second = four[i + 2];
            const int half = (first & 0x80) << 8 | (first & 0x7f) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 |
                             (second & 0x0f);
            packed[4 * t + 2 * i] = static_cast<uint8_t>(half);
            packed[4 * t + 2 * i + 1] = static_cast<uint8_t>(half >> 8);
        }
    }
}

int main(int, char** words) {
    const std::string kernel = words[1];
    const auto number = [&](int at) { return std::strtol(words[at], nullptr, 10); };
    DealtFp8LinearParams dealt_params = {};
    Fp8LinearParams& p = dealt_params;
    p.rows = number(2);
    p.in_features = number(3);
    p.out_features = number(4);
    p.block_rows = static_cast<uint32_t>(number(5));
    p.scale_shift = static_cast<int>(number(6));
    p.gated = number(7) != 0;
    const bool normed = number(8) != 0, dealt = number(9) != 0;
    const int64_t k = p.in_features, n = p.out_features * (p.gated ? 2 : 1);
    p.scale_stride = ((k - 1) >> p.scale_shift) + 1;
    const int64_t scale_rows = (n + p.block_rows - 1) / p.block_rows;
    std::vector<float> scales(scale_rows * p.scale_stride);
    for (float& scale : scales) {
        scale = static_cast<float>(random_number() + 1.5) * 0.01f;
        if (dealt) scale = __bfloat162float(__float2bfloat16_rn(scale));
    }
    // Memory of its own size for each, so that a sanitizer finds a read past it.
    std::unique_ptr<uint8_t[]> packed(new uint8_t[n * k]);
    std::unique_ptr<T[]> wide(new T[n * k]), x(new T[p.rows * k]);
    std::unique_ptr<T[]> norm(new T[k]);
    std::vector<uint8_t> codes(k);
    for (int64_t row = 0; row < n; ++row) {
        for (int64_t column = 0; column < k; ++column) {
            int code = static_cast<int>((random_number() + 1) * 127.99);
            if ((code & 127) == 127) code = 0x3c;
            codes[column] = static_cast<uint8_t>(code);
            const float scale = scales[row / p.block_rows * p.scale_stride + (column >> p.scale_shift)];
            wide[row * k + column] = __float2bfloat16_rn(e4m3(code) * scale);
        }
        for (int64_t column = 0; column < k; column += 16) pack(&codes[column], dealt, &packed[row * k + column]);
    }
    for (int64_t i = 0; i < p.rows * k; ++i) x[i] = __float2bfloat16_rn(static_cast<float>(random_number()));
    for (int64_t i = 0; i < k; ++i) norm[i] = __float2bfloat16_rn(static_cast<float>(random_number()));
    std::vector<T> ours(p.rows * p.out_features), theirs(ours.size());
    p.x = x.get();
    p.norm = normed ? norm.get() : nullptr;
    p.x_stride = k;
    p.y_stride = p.out_features;
    p.norm_eps = 1e-5f;
    LinearParams plain = p;
    plain.weight = wide.get();
    plain.y = theirs.data();
    p.weight = packed.get();
    p.scales = scales.data();
    p.y = ours.data();
    std::vector<T> widened(n * k);
    Fp8LinearParams matrix = p;
    matrix.y = widened.data();
    matrix.out_features = n;
    launch_widen_fp8(matrix, dealt, nullptr);
    const auto both = [&](auto is_normed) {
        constexpr bool kNormed = decltype(is_normed)::value;
        dealt ? run<kNormed>(kernel, dealt_params) : run<kNormed>(kernel, p);
        run<kNormed>(kernel, plain);
    };
    normed ? both(std::true_type()) : both(std::false_type());
    int differ = 0;
    for (int64_t i = 0; i < n * k; ++i) differ += std::memcmp(&widened[i], &wide[i], 2) != 0;
    double off = 0;
    for (int64_t row = 0; row < p.rows; ++row) {
        double squares = 0;
        for (int64_t i = 0; i < k; ++i) squares += std::pow(__bfloat162float(x[row * k + i]), 2);
        const double factor = normed ? 1 / std::sqrt(squares / k + p.norm_eps) : 1;
        const auto product = [&](int64_t column) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
                float v = __bfloat162float(x[row * k + i]);
                if (normed) v = __bfloat162float(__float2bfloat16_rn(v * __bfloat162float(norm[i])));
                sum += double{v} * __bfloat162float(wide[column * k + i]);
            }
            return sum * factor;
        };
        for (int64_t column = 0; column < p.out_features; ++column) {
            const int64_t at = row * p.out_features + column;
            differ += std::memcmp(&ours[at], &theirs[at], 2) != 0;
            double expected = product(column);
            if (p.gated) expected = expected / (1 + std::exp(-expected)) * product(column + p.out_features);
            off = std::max(off, std::abs(__bfloat162float(ours[at]) - expected) / (1 + std::abs(expected)));
        }
    }
    std::printf("%d %.4f\n", differ, off);
}
