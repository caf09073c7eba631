// A small tile of dot products: out[m][n] = sum_k x[m, k] * w[n, k].
//
// Every output has one vector accumulator that walks k from left to right and is summed over its lanes
// at the end. The tile's shape decides only how many loads are shared, never the order of additions, so
// a result is bitwise the same in a tile of any shape. Batch invariance rests on this file.
#pragma once

#include "cpu/kernels/simd.h"

namespace tide::TIDE_ISA {

enum class Prefetch { kNone, kNextTile };

constexpr int64_t kCacheLineBytes = 64;

// Elements of k between two bursts of prefetches: one cache line per row of w.
template <typename T>
constexpr int64_t kPrefetchSegment = kCacheLineBytes / static_cast<int64_t>(sizeof(T));

// While a tile walks its kCols rows of w, it prefetches the rows after them in the order they lie in memory.
// Processors do not foresee the jump from one short weight row to the next; asking, into the second-level
// cache, gained 20% at one row of x and 45% at four (Neoverse-N1, float32, 576 columns, cold weights).
// Addresses past the end are fine: a prefetch never faults.
template <int kLines, typename T>
TIDE_INLINE void prefetch_lines(const T* next) {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * kPrefetchSegment<T>, 0, 2);
}

template <int kRows, int kCols, Prefetch kPrefetch = Prefetch::kNone, typename T>
TIDE_INLINE void dot_tile(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth,
                          float (&out)[kRows][kCols]) {
    Vec sums[kRows][kCols] = {};
    auto step = [&](auto load_x, auto load_w) __attribute__((always_inline)) {
        Vec wv[kCols];
#pragma GCC unroll 16
        for (int n = 0; n < kCols; ++n) wv[n] = load_w(w + n * w_stride);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
            const Vec xv = load_x(x + m * x_stride);
#pragma GCC unroll 16
            for (int n = 0; n < kCols; ++n) sums[m][n] = multiply_add(xv, wv[n], sums[m][n]);
        }
    };
    auto full_step = [&](int64_t k) __attribute__((always_inline)) {
        step([k](const float* p) __attribute__((always_inline)) { return load(p + k); },
             [k](const T* p) __attribute__((always_inline)) { return load(p + k); });
    };
    int64_t k = 0;
    if constexpr (kPrefetch == Prefetch::kNextTile) {
        constexpr int64_t kSegment = kPrefetchSegment<T>;
        const T* next = w + kCols * w_stride;
        for (; k + kSegment <= depth; next += kCols * kSegment) {
            prefetch_lines<kCols>(next);
            const int64_t end = k + kSegment;
            if constexpr (kRows * kCols <= 8) {
#pragma GCC unroll 8
                for (; k < end; k += kLanes) full_step(k);
            } else {  // unrolling a full tile runs out of registers
#pragma GCC unroll 1
                for (; k < end; k += kLanes) full_step(k);
            }
        }
    }
    for (; k + kLanes <= depth; k += kLanes) full_step(k);
    if (k < depth) {
        const int64_t rest = depth - k;
        step([=](const float* p) __attribute__((always_inline)) { return load_partial(p + k, rest); },
             [=](const T* p) __attribute__((always_inline)) { return load_partial(p + k, rest); });
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < kCols; ++n) out[m][n] = lane_sum(sums[m][n]);
}

}  // namespace tide::TIDE_ISA
