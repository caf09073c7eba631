// y = x weight^T + bias, one dot product per output (see dot_tile.h).
//
// Decoding is bound by reading weights: a strip of a few weight rows is read from memory once and meets
// every row of x while it lies in the first-level cache. The first rows to meet it prefetch the strip after it:
// early enough to have arrived when its turn comes, and spread over the walk of a whole tile.
#include "cpu/kernels/convert.h"
#include "cpu/kernels/dot_tile.h"
#include "cpu/kernels/kernels.h"

namespace tide::TIDE_ISA {
namespace {

// Up to this many rows, half-width weights are converted in registers; beyond, the strip is converted once.
constexpr int64_t kMaxRowsConvertedInFlight = 8;

constexpr int kStrip = kNumRegisters == 32 ? 4 : 2;  // a tile's accumulators must fit the registers
// Tiles of up to five rows keep the multipliers busiest (Neoverse-N1: 66 GFLOP/s with two cores at 64 rows; four rows
// 64, six 60, eight by three columns 46), but six rows are better off in one tile than in two.
constexpr int64_t kMostRowsInOneTile = 6;
constexpr int64_t kTileRows = 5;

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

template <int kCols, Prefetch kPrefetch, typename T, typename W>
void write_rows(const LinearParams& params, const W* strip, int64_t row, int64_t count, int64_t col) {
    switch (count) {
        case 1:
            return write_tile<1, kCols, kPrefetch, T>(params, strip, row, col);
        case 2:
            return write_tile<2, kCols, kPrefetch, T>(params, strip, row, col);
        case 3:
            return write_tile<3, kCols, kPrefetch, T>(params, strip, row, col);
        case 4:
            return write_tile<4, kCols, kPrefetch, T>(params, strip, row, col);
        case 5:
            return write_tile<5, kCols, kPrefetch, T>(params, strip, row, col);
        case 6:
            return write_tile<6, kCols, kPrefetch, T>(params, strip, row, col);
    }
}

// All rows of x against one strip of kCols weight rows, in tiles of nearly equal size: a last tile of one row
// would cost as much as two.
template <int kCols, typename T, typename W>
void write_strip(const LinearParams& params, const W* strip, int64_t col) {
    const int64_t tiles = params.rows <= kMostRowsInOneTile ? 1 : (params.rows + kTileRows - 1) / kTileRows;
    const int64_t smaller = params.rows / tiles;
    const int64_t num_larger = params.rows % tiles;
    int64_t row = smaller + (num_larger > 0);
    write_rows<kCols, Prefetch::kNextTile, T>(params, strip, 0, row, col);
    for (int64_t tile = 1; tile < tiles; ++tile) {
        const int64_t count = smaller + (tile < num_larger);
        write_rows<kCols, Prefetch::kNone, T>(params, strip, row, count, col);
        row += count;
    }
}

template <int kCols, typename T, typename W>
void read_and_write_strip(const LinearParams& params, int64_t col, float* scratch) {
    const W* strip = static_cast<const W*>(params.weight) + col * params.in_features;
    if constexpr (sizeof(W) < sizeof(float)) {
        if (params.rows > kMaxRowsConvertedInFlight) {
            convert_to_float(strip, scratch, kCols * params.in_features);
            return write_strip<kCols, T>(params, scratch, col);
        }
    }
    write_strip<kCols, T>(params, strip, col);
}

}  // namespace

int64_t linear_scratch_floats(int64_t in_features) {
    return kStrip * in_features;
}

template <typename T, typename W>
void linear(const LinearParams& params, int64_t first, int64_t last, float* scratch) {
    int64_t col = first;
    for (; col + kStrip <= last; col += kStrip) read_and_write_strip<kStrip, T, W>(params, col, scratch);
    for (; col < last; ++col) read_and_write_strip<1, T, W>(params, col, scratch);
}

#define TIDE_INSTANTIATE(T) template void linear<T, T>(const LinearParams&, int64_t, int64_t, float*);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)
template void linear<float, BFloat16>(const LinearParams&, int64_t, int64_t, float*);

}  // namespace tide::TIDE_ISA
