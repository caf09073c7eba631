// The bfloat16 linear in tiles, on the software model, against one plain loop per output in the documented order: every
// bit must agree.
//
//   check ordinary|cancelling|tiny THREADS ROWS IN_FEATURES OUT_FEATURES BIAS
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "cpu/kernels/linear_tiles.h"
#include "cpu/kernels/tile_ops.h"
#include "cpu/ops/linear_tiles.h"
#include "cpu/ops/thread_pool.h"

namespace {

using namespace tide::model;
using tide::BFloat16;
using tide::tile_model::flushed;
constexpr int64_t kStepDepth = 32;

float wide(BFloat16 narrow) {
    const uint32_t bits = static_cast<uint32_t>(narrow.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

BFloat16 rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Exactly as long as said, so that the address sanitizer sees a read behind the end.
std::unique_ptr<BFloat16[]> random_numbers(int64_t count, float scale = 1.0f) {
    static uint32_t state = 12345;
    std::unique_ptr<BFloat16[]> numbers(new BFloat16[count]);
    for (int64_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = rounded(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
        numbers[i] = rounded(wide(numbers[i]) * scale);
    }
    return numbers;
}

// The second half of every row becomes the first one backwards, times `sign`. Products of such rows, with one sign
// turned, add up to nothing but what was rounded away: a sum in any other order shows.
void mirror(BFloat16* numbers, int64_t rows, int64_t depth, float sign) {
    for (int64_t row = 0; row < rows; ++row, numbers += depth)
        for (int64_t k = 0; k < depth / 2; ++k) numbers[depth - 1 - k] = rounded(sign * wide(numbers[k]));
}

BFloat16 expected_output(const BFloat16* x, const BFloat16* weight, int64_t depth, float bias) {
    float sum = 0.0f;
    for (int64_t step = 0; step < depth; step += kStepDepth) {
        float chains[2] = {};
        for (int64_t k = step; k < std::min(depth, step + kStepDepth); ++k)
            chains[k % 2] = flushed(std::fmaf(flushed(wide(weight[k])), flushed(wide(x[k])), chains[k % 2]));
        sum = flushed(sum + flushed(chains[0] + chains[1]));
    }
    return rounded(sum + bias);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) return 2;
    const bool cancelling = argv[1] == std::string("cancelling"), tiny = argv[1] == std::string("tiny");
    tide::set_num_threads(std::atoi(argv[2]));
    const int64_t rows = std::atoll(argv[3]), depth = std::atoll(argv[4]), columns = std::atoll(argv[5]);
    const float scale = tiny ? 0x1p-63f : 1.0f;  // of products about the smallest normal number
    const auto x = random_numbers(rows * depth, scale), weight = random_numbers(columns * depth, scale),
               bias = random_numbers(columns, cancelling ? 0x1p-22f : scale * scale);  // no larger than sums are
    if (cancelling) {
        mirror(x.get(), rows, depth, 1.0f);
        mirror(weight.get(), columns, depth, -1.0f);
    }
    const auto y = random_numbers(rows * columns);
    const BFloat16* added = std::atoi(argv[6]) ? bias.get() : nullptr;
    const tide::TileLinear tiles = {tile_packed_words, tile_pack_units, tile_pack, tile_scratch_floats, tile_linear};
    tide::linear_in_tiles(tiles, x.get(), weight.get(), added, y.get(), rows, depth, columns);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
            const BFloat16 wanted = expected_output(x.get() + row * depth, weight.get() + column * depth, depth,
                                                    added ? wide(added[column]) : 0.0f);
            const BFloat16 actual = y[row * columns + column];
            if (actual.bits != wanted.bits) {
                std::printf("row %lld, column %lld: got %g, expected %g\n", static_cast<long long>(row),
                            static_cast<long long>(column), wide(actual), wide(wanted));
                return 1;
            }
        }
    }
    return 0;
}
