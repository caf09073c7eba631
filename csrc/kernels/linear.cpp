// y = x weight^T + bias, one dot product per output (see dot_tile.h).
//
// Decoding is bound by reading weights: a strip of a few weight rows is read from memory once and meets
// every row of x while it lies in the first-level cache; the last rows of x to meet it already ask for the
// next strip.
#include "kernels/convert.h"
#include "kernels/dot_tile.h"
#include "kernels/kernels.h"

namespace tide::TIDE_ISA {
namespace {

constexpr int kTileRows = 4;
constexpr int kStrip = kNumRegisters == 32 ? 4 : 2;  // accumulators of a tile take half the registers
// Up to this many rows, half-width weights are converted in registers; beyond, the strip is converted once.
constexpr int64_t kMaxRowsConvertedInFlight = 2 * kTileRows;

template <int kRows, int kCols, Prefetch kPrefetch, typename T, typename W>
void write_tile(const LinearParams& params, const W* strip, int64_t row, int64_t col) {
    float dots[kRows][kCols];
    const int64_t depth = params.in_features;
    dot_tile<kRows, kCols, kPrefetch>(params.x + row * depth, depth, strip, depth, depth, dots);
    const T* bias = static_cast<const T*>(params.bias);
    for (int m = 0; m < kRows; ++m) {
        T* y = static_cast<T*>(params.y) + (row + m) * params.out_features + col;
        if (bias) {
            for (int n = 0; n < kCols; ++n) dots[m][n] += load_scalar(bias + col + n);
        }
        if constexpr (kCols == kLanes) {
            store(y, load(dots[m]));
        } else {
            for (int n = 0; n < kCols; ++n) store_scalar(y + n, dots[m][n]);
        }
    }
}

// All rows of x against one strip of kCols weight rows.
template <int kCols, typename T, typename W>
void write_strip(const LinearParams& params, const W* strip, int64_t col) {
    int64_t row = 0;
    for (; row + kTileRows < params.rows; row += kTileRows)
        write_tile<kTileRows, kCols, Prefetch::kNone, T>(params, strip, row, col);
    switch (params.rows - row) {
        case 4: return write_tile<4, kCols, Prefetch::kNextTile, T>(params, strip, row, col);
        case 3: return write_tile<3, kCols, Prefetch::kNextTile, T>(params, strip, row, col);
        case 2: return write_tile<2, kCols, Prefetch::kNextTile, T>(params, strip, row, col);
        case 1: return write_tile<1, kCols, Prefetch::kNextTile, T>(params, strip, row, col);
    }
}

template <int kCols, typename T>
void read_and_write_strip(const LinearParams& params, int64_t col, float* scratch) {
    const T* strip = static_cast<const T*>(params.weight) + col * params.in_features;
    if constexpr (sizeof(T) < sizeof(float)) {
        if (params.rows > kMaxRowsConvertedInFlight) {
            convert_to_float(strip, scratch, kCols * params.in_features);
            return write_strip<kCols, T>(params, scratch, col);
        }
    }
    write_strip<kCols, T>(params, strip, col);
}

}  // namespace

int64_t linear_scratch_floats(int64_t in_features) { return kStrip * in_features; }

template <typename T>
void linear(const LinearParams& params, int64_t first, int64_t last, float* scratch) {
    int64_t col = first;
    for (; col + kStrip <= last; col += kStrip) read_and_write_strip<kStrip, T>(params, col, scratch);
    for (; col < last; ++col) read_and_write_strip<1, T>(params, col, scratch);
}

#define TIDE_INSTANTIATE(T) template void linear<T>(const LinearParams&, int64_t, int64_t, float*);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
