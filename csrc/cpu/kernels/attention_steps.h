// The three steps of attention over one page: scores, softmax, weighted values. A "lane" is one query head of
// one query; lanes that attend the same slots share the loads of keys and values.
#pragma once

#include "cpu/kernels/dot_tile.h"
#include "cpu/kernels/params.h"
#include "cpu/kernels/vector_math.h"

namespace tide::TIDE_ISA {

constexpr int kMaxSharedRows = kNumRegisters == 32 ? 4 : 2;

// Calls body(Count<k>, first row) over blocks of at most kMaxSharedRows rows.
template <typename Body>
TIDE_INLINE void for_row_blocks(int64_t rows, Body body) {
    int64_t row = 0;
    for (; row + kMaxSharedRows <= rows; row += kMaxSharedRows) body(Count<kMaxSharedRows>{}, row);
    if (rows - row == 3) body(Count<3>{}, row);
    if (rows - row == 2) body(Count<2>{}, row);
    if (rows - row == 1) body(Count<1>{}, row);
}

// Scores of kRows lanes for the page's slots [first, last).
template <int kRows>
void score_rows(const float* q, const float* keys, int64_t key_dim, int64_t first, int64_t last, float* scores,
                int64_t stride) {
    constexpr int kCols = 4;  // at most 4 x 4 or 2 x 4 accumulators, half the registers
    int64_t slot = first;
    for (; slot + kCols <= last; slot += kCols) {
        float dots[kRows][kCols];
        dot_tile<kRows, kCols>(q, key_dim, keys + slot * key_dim, key_dim, key_dim, dots);
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kCols; ++n) scores[m * stride + slot + n] = dots[m][n];
    }
    for (; slot < last; ++slot) {
        float dots[kRows][1];
        dot_tile<kRows, 1>(q, key_dim, keys + slot * key_dim, key_dim, key_dim, dots);
        for (int m = 0; m < kRows; ++m) scores[m * stride + slot] = dots[m][0];
    }
}

// Turns the scores of slots [first, last) into probabilities and rescales what was summed before if a
// larger score came. Slots outside the range get probability 0.
TIDE_INLINE void soften(const PagedAttentionParams& p, float* scores, int64_t stride, int64_t first, int64_t last,
                        float* max_score, float* total, float* sums) {
    constexpr float kUnseen = -__builtin_inff();
    for (int64_t slot = 0; slot < first; ++slot) scores[slot] = kUnseen;
    for (int64_t slot = last; slot < stride; ++slot) scores[slot] = kUnseen;
    Vec max_scores = splat(*max_score);
    for (int64_t slot = 0; slot < stride; slot += kLanes) {
        const Vec raw = load(scores + slot);
        Vec s = raw * p.scaling;
        if (p.softcap > 0.0f) s = p.softcap * vector_tanh(s / p.softcap);
        s = select(raw == kUnseen, raw, s);
        max_scores = vector_max(s, max_scores);
        store(scores + slot, s);
    }
    float new_max = *max_score;
    for (int lane = 0; lane < kLanes; ++lane) new_max = max_scores[lane] > new_max ? max_scores[lane] : new_max;
    if (new_max > *max_score) {
        const float shrink = vector_exp(splat(*max_score - new_max))[0];
        *total *= shrink;
        for (int64_t d = 0; d < p.value_dim; ++d) sums[d] *= shrink;
        *max_score = new_max;
    }
    Vec page_total = {};
    for (int64_t slot = 0; slot < stride; slot += kLanes) {
        const Vec s = load(scores + slot);
        const Vec probability = select(s == kUnseen, Vec{}, vector_exp(s - new_max));
        store(scores + slot, probability);
        page_total += probability;
    }
    *total += lane_sum(page_total);
}

// sums[m, d...] += probabilities[m, slot] * values[slot, d...] for kRows lanes and kVectors vectors of d.
template <int kRows, int kVectors>
TIDE_INLINE void add_columns(const float* probabilities, int64_t stride, const float* values, int64_t value_dim,
                             int64_t first, int64_t last, float* sums) {
    Vec acc[kRows][kVectors];
    for (int m = 0; m < kRows; ++m)
        for (int c = 0; c < kVectors; ++c) acc[m][c] = load(sums + m * value_dim + c * kLanes);
    auto add = [&](int64_t slot, auto weight_of) __attribute__((always_inline)) {
        Vec v[kVectors];
        for (int c = 0; c < kVectors; ++c) v[c] = load(values + slot * value_dim + c * kLanes);
        for (int m = 0; m < kRows; ++m)
            for (int c = 0; c < kVectors; ++c) acc[m][c] = weight_of(m, acc[m][c], v[c]);
    };
    int64_t slot = first;
#if defined(__aarch64__)
    // A multiply-add can take one lane of a register; broadcasting from memory costs an operation here.
    for (; slot + 4 <= last; slot += 4) {
        float32x4_t weights[kRows];
        for (int m = 0; m < kRows; ++m) weights[m] = vld1q_f32(probabilities + m * stride + slot);
#define TIDE_ADD_SLOT(lane)                                                                                            \
    add(slot + lane, [&](int m, Vec sum, Vec v) __attribute__((always_inline)) {                                       \
        return bit_cast<Vec>(vfmaq_laneq_f32(bit_cast<float32x4_t>(sum), bit_cast<float32x4_t>(v), weights[m], lane)); \
    });
        TIDE_ADD_SLOT(0) TIDE_ADD_SLOT(1) TIDE_ADD_SLOT(2) TIDE_ADD_SLOT(3)
#undef TIDE_ADD_SLOT
    }
#endif
    for (; slot < last; ++slot) {
        add(slot, [&](int m, Vec sum, Vec v) __attribute__((always_inline)) {
            return multiply_add(splat(probabilities[m * stride + slot]), v, sum);
        });
    }
    for (int m = 0; m < kRows; ++m)
        for (int c = 0; c < kVectors; ++c) store(sums + m * value_dim + c * kLanes, acc[m][c]);
}

// The same over the whole width, for kRows lanes that attend the same slots.
template <int kRows>
void add_values(const float* probabilities, int64_t stride, const float* values, int64_t value_dim, int64_t first,
                int64_t last, float* sums) {
    constexpr int kVectors = 4;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= value_dim; d += kVectors * kLanes)
        add_columns<kRows, kVectors>(probabilities, stride, values + d, value_dim, first, last, sums + d);
    for (; d + kLanes <= value_dim; d += kLanes)
        add_columns<kRows, 1>(probabilities, stride, values + d, value_dim, first, last, sums + d);
    for (; d < value_dim; ++d)
        for (int m = 0; m < kRows; ++m)
            for (int64_t slot = first; slot < last; ++slot)
                sums[m * value_dim + d] += probabilities[m * stride + slot] * values[slot * value_dim + d];
}

}  // namespace tide::TIDE_ISA
