// Where the E4M3 weights of a row tile lie, in memory and in a stage, and what a lane copies and reads of them. Index
// arithmetic alone: tests/kernels/test_fp8_stage.py runs it on the host.
//
// In memory the 16 bytes of 16 neighbouring columns are those of columns 0, 1, 8, 9, 2, 3, 10, 11, ...: the four that
// load_matrices() gives to thread t are columns 2t, 2t + 1, 2t + 8 and 2t + 9, which multiply_tile() wants of it. So
// x and the products are those of half-width weights.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TIDE_INDEX __host__ __device__ constexpr
#else
#define TIDE_INDEX constexpr
#endif

namespace tide::cuda {

constexpr int kFp8Vector = 16;  // columns of 16 bytes

// Rows of kColumns bytes, one after another. Vector v of a row lies at v ^ swizzled(row): 8 rows of one column of
// vectors are in different banks. For 64 columns that is the 64-byte swizzle of the copy engine.
template <int kColumns_>
struct Fp8Stage {
    static constexpr int kColumns = kColumns_, kRows = 16;
    static constexpr int kVectors = kColumns / kFp8Vector;  // of a row
    static constexpr int kRowsAtOnce = 32 / kVectors;       // that the 32 lanes copy, a vector each
    static constexpr int kCopies = kRows / kRowsAtOnce;     // of a row tile
    static constexpr int kTileBytes = kRows * kColumns;
    static constexpr int kPairs = kColumns / 32;  // load_matrices() of a row tile, 32 columns each
    static_assert(kColumns == 32 || kColumns == 64);

    static TIDE_INDEX int swizzled(int row) { return row / (128 / kColumns) % kVectors; }
    static TIDE_INDEX int offset(int row, int vector) { return row * kColumns + (vector ^ swizzled(row)) * kFp8Vector; }
    // Of the first copy; the next one brings row + kRowsAtOnce, kTileBytes / kCopies further on.
    static TIDE_INDEX int copied_row(int lane) { return lane / kVectors; }
    static TIDE_INDEX int copied_vector(int lane) { return lane % kVectors; }
    // What a lane names to load_matrices(): rows 0 to 7, then 8 to 15, of 16 columns, then of the next 16.
    static TIDE_INDEX int named(int lane, int pair) {
        return offset(lane % 8 + lane / 8 % 2 * 8, 2 * pair + lane / 16);
    }
};

}  // namespace tide::cuda
