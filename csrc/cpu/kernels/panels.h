// How block-quantised weights lie in memory: panels of 16 outputs, so that one vector of a product holds the outputs
// side by side and every sum has one order, whatever the number of rows it is made with.
//
// A weight is scale * (code - offset) + minimum. Codes have 4, 5, 6 or 8 bits, as they have in the file; scale and
// minimum belong to a group of 16 or 32 neighbours along k, and are those of the file, too:
//
//   scales of a panel      of each block along k: 16 halves of scales, 16 of minima, then for each step of 32 along k
//                          16 bytes of factors for each group and 16 for the minima; each part only where the kind has
//                          it. A scale is half * factor, a minimum half * factor, or - half * factor.
//   codes of a panel       of each step: the lines of its low bits, then those of its high bits
//
// A line has 64 bytes, four along k for each output: byte 4 * output + i. A step has eight such lines of codes, 0 to
// 7 along k. Of codes up to 6 bits the low four stand in lines 0 to 3, those of lines 4 to 7 in the upper halves of the
// bytes; the fifth bits fill one line, bit n of a byte for line n; fifth and sixth two lines, four pairs in each.
#pragma once

#include <stdint.h>

namespace tide {

constexpr int64_t kPanel = 16;       // outputs
constexpr int64_t kStep = 32;        // along k
constexpr int64_t kPanelLine = 64;   // bytes: four along k of 16 outputs
constexpr int64_t kLinesOfStep = 8;  // of codes

enum class PanelKind : int { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };
constexpr int kNumPanelKinds = 8;

struct PanelFormat {
    int bits;
    int offset;          // of a code
    int steps_of_block;  // 1; 8 where factors refine the halves
    int groups_of_step;
    bool has_minima;
    int64_t block_bytes;  // of one row in a file

    constexpr bool has_factors() const { return steps_of_block > 1; }
    constexpr int64_t halves_bytes() const { return 2 * kPanel * (1 + has_minima); }
    constexpr int64_t factors_bytes() const { return has_factors() ? kPanel * (groups_of_step + has_minima) : 0; }
    constexpr int64_t scales_bytes() const { return halves_bytes() + steps_of_block * factors_bytes(); }  // of a block
    constexpr int64_t low_lines() const { return bits == 8 ? 8 : 4; }
    constexpr int64_t high_lines() const { return bits == 8 ? 0 : bits - 4; }
    constexpr int64_t step_bytes() const { return (low_lines() + high_lines()) * kPanelLine; }
    // Of a panel: its scales up to the next line, then its codes.
    constexpr int64_t codes_offset(int64_t in_features) const {
        const int64_t scales = in_features / (kStep * steps_of_block) * scales_bytes();
        return (scales + kPanelLine - 1) / kPanelLine * kPanelLine;
    }
    constexpr int64_t panel_bytes(int64_t in_features) const {
        return codes_offset(in_features) + in_features / kStep * step_bytes();
    }
};

constexpr PanelFormat kPanelFormats[kNumPanelKinds] = {
    {4, 8, 1, 1, false, 18},    // Q4_0
    {4, 0, 1, 1, true, 20},     // Q4_1
    {5, 16, 1, 1, false, 22},   // Q5_0
    {5, 0, 1, 1, true, 24},     // Q5_1
    {8, 0, 1, 1, false, 34},    // Q8_0: codes have a sign
    {4, 0, 8, 1, true, 144},    // Q4_K
    {5, 0, 8, 1, true, 176},    // Q5_K
    {6, 32, 8, 2, false, 210},  // Q6_K: factors have a sign
};

// A row of x in 8 bits: x[k] = scale * code, one scale for each step.
struct QuantisedRow {
    const int8_t* codes;  // [in_features]
    const float* scales;  // [in_features / 32]
    const int32_t* sums;  // [in_features / 16], of the codes
};

// Of one row of x: codes, then scales, then sums.
constexpr int64_t quantised_row_bytes(int64_t in_features) {
    return in_features + in_features / kStep * 4 + in_features / kStep * 8;
}

}  // namespace tide
