// y = x weight^T + bias for block-quantised weights (see panels.h) and rows of x in 8 bits.
//
// Products of codes are whole numbers and exact. For each output and group they become one float, and the groups are
// added one after another, so a sum has one order on every machine with fused additions, beside any rows.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/panels.h"
#include "cpu/kernels/quantised_steps.h"
#include "cpu/kernels/simd.h"
#include "cpu/kernels/vector_math.h"

namespace tide::TIDE_ISA {
namespace {

constexpr int kMostRows = kNumRegisters == 32 ? 6 : 4;  // of a tile: dots and sums must fit the registers
constexpr int kParts = kPanel / kLanes;                 // of a panel: outputs beside each other in a vector

TIDE_INLINE QuantisedRow row_of(const void* rows, int64_t in_features, int64_t row) {
    const char* start = static_cast<const char*>(rows) + row * quantised_row_bytes(in_features);
    const char* scales = start + in_features;
    return {reinterpret_cast<const int8_t*>(start), reinterpret_cast<const float*>(scales),
            reinterpret_cast<const int32_t*>(scales + in_features / kStep * sizeof(float))};
}

template <typename Byte>
TIDE_INLINE Vec bytes_to_float(const void* from) {
    typedef Byte Bytes __attribute__((vector_size(kLanes)));
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

// The codes of a line of a step, of the outputs of a part.
template <int kKind>
TIDE_INLINE BitVec codes_of(const uint8_t* step, int line) {
    constexpr PanelFormat kFormat = kPanelFormats[kKind];
    BitVec low;
    const int low_line = kFormat.bits == 8 ? line : line % 4;
    __builtin_memcpy(&low, step + low_line * kPanelLine, sizeof(low));
    if constexpr (kFormat.bits == 8) return low;
    BitVec codes = (line < 4 ? low : low >> 4) & 0x0f0f0f0fu;
    if constexpr (kFormat.bits > 4) {
        constexpr int kHigh = kFormat.bits - 4;
        constexpr int kLinesOfHigh = 8 / kHigh;
        BitVec high;
        __builtin_memcpy(&high, step + (4 + line / kLinesOfHigh) * kPanelLine, sizeof(high));
        const int shift = 4 - kHigh * (line % kLinesOfHigh);
        high = shift > 0 ? high << shift : high >> -shift;
        codes |= high & (kHigh == 1 ? 0x10101010u : 0x30303030u);
    }
    return codes;
}

// kRows rows of x beside one part of a panel.
template <int kKind, int kRows>
void write_tile(const QuantisedLinearParams& p, int64_t panel, int part, int64_t row) {
    constexpr PanelFormat kFormat = kPanelFormats[kKind];
    constexpr bool kSigned = kFormat.bits == 8;
    constexpr int kGroups = kFormat.groups_of_step;
    const uint8_t* start = static_cast<const uint8_t*>(p.panels) + panel * kFormat.panel_bytes(p.in_features);
    const uint8_t* scales = start + part * kLanes * 2;
    const uint8_t* codes = start + kFormat.codes_offset(p.in_features) + part * kLanes * 4;
    QuantisedRow x[kRows];
    for (int m = 0; m < kRows; ++m) x[m] = row_of(p.x, p.in_features, row + m);
    Vec sums[kRows] = {};
    const int64_t blocks = p.in_features / (kStep * kFormat.steps_of_block);
    int64_t step = 0;
    for (int64_t block = 0; block < blocks; ++block, scales += kFormat.scales_bytes()) {
        const Vec halves = load(reinterpret_cast<const Half*>(scales));
        Vec minima = {};
        if constexpr (kFormat.has_minima) minima = load(reinterpret_cast<const Half*>(scales + 2 * kPanel));
        // Factors are bytes, so the part starts nearer.
        const uint8_t* factors = scales + kFormat.halves_bytes() - part * kLanes;
        for (int of_block = 0; of_block < kFormat.steps_of_block; ++of_block, ++step) {
            Vec minimum = minima;
            if constexpr (kFormat.has_factors() && kFormat.has_minima)
                minimum = minima * -bytes_to_float<uint8_t>(factors + kPanel);
#pragma GCC unroll 2
            for (int group = 0; group < kGroups; ++group) {
                constexpr int kLines = kLinesOfStep / kGroups;
                IntVec dots[kRows] = {};
#pragma GCC unroll 8
                for (int i = 0; i < kLines; ++i) {
                    const int line = group * kLines + i;
                    const BitVec w = codes_of<kKind>(codes, line);
#pragma GCC unroll 8
                    for (int m = 0; m < kRows; ++m)
                        dots[m] = add_dot4<kSigned>(w, x[m].codes + step * kStep + 4 * line, dots[m]);
                }
                Vec scale = halves;
                if constexpr (kFormat.has_factors() && kGroups == 1)
                    scale = halves * bytes_to_float<uint8_t>(factors);
                else if constexpr (kFormat.has_factors())
                    scale = halves * bytes_to_float<int8_t>(factors + group * kPanel);
                constexpr int kOffset = kFormat.offset + (kSigned ? kSignOffset : 0);
#pragma GCC unroll 8
                for (int m = 0; m < kRows; ++m) {
                    int32_t of_x = 0;
                    if constexpr (kOffset != 0 || kFormat.has_minima)
                        of_x =
                            kGroups == 1 ? x[m].sums[2 * step] + x[m].sums[2 * step + 1] : x[m].sums[2 * step + group];
                    IntVec dot = dots[m];
                    if constexpr (kOffset != 0) dot -= kOffset * of_x;
                    const float x_scale = x[m].scales[step];
                    sums[m] = multiply_add(__builtin_convertvector(dot, Vec), scale * x_scale, sums[m]);
                    if constexpr (kFormat.has_minima)
                        sums[m] = multiply_add(minimum, splat(x_scale * static_cast<float>(of_x)), sums[m]);
                }
            }
            factors += kFormat.factors_bytes();
            codes += kFormat.step_bytes();
        }
    }
    const int64_t column = panel * kPanel + part * kLanes;
    const int64_t columns = p.out_features - column < kLanes ? p.out_features - column : kLanes;
    for (int m = 0; m < kRows; ++m) {
        float* y = p.y + (row + m) * p.out_features + column;
        if (columns == kLanes) {
            store(y, p.bias ? sums[m] + load(p.bias + column) : sums[m]);
        } else if (columns > 0) {
            store_partial(y, p.bias ? sums[m] + load_partial(p.bias + column, columns) : sums[m], columns);
        }
    }
}

template <int kKind>
void write_tiles(const QuantisedLinearParams& p, int64_t panel, int part, int64_t row, int64_t count) {
    constexpr int kAtMostFive = kMostRows < 5 ? kMostRows : 5;
    switch (count) {
        case 1:
            return write_tile<kKind, 1>(p, panel, part, row);
        case 2:
            return write_tile<kKind, 2>(p, panel, part, row);
        case 3:
            return write_tile<kKind, 3>(p, panel, part, row);
        case 4:
            return write_tile<kKind, 4>(p, panel, part, row);
        case 5:
            return write_tile<kKind, kAtMostFive>(p, panel, part, row);
        default:
            return write_tile<kKind, kMostRows>(p, panel, part, row);
    }
}

template <int kKind>
void of_kind(const QuantisedLinearParams& p, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
        for (int part = 0; part < kParts; ++part)
            for (int64_t row = 0; row < p.rows; row += kMostRows)
                write_tiles<kKind>(p, panel, part, row, p.rows - row < kMostRows ? p.rows - row : kMostRows);
}

// The largest magnitude of a step; NaN if there is one.
TIDE_INLINE float largest_of(const float* x) {
    Vec most = {};
    for (int64_t k = 0; k < kStep; k += kLanes) {
        const Vec v = load(x + k);
        most = max_or_nan(max_or_nan(v, -v), most);
    }
    float largest = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (most[lane] != most[lane]) return most[lane];
        if (most[lane] > largest) largest = most[lane];
    }
    return largest;
}

}  // namespace

void quantise_rows(const float* x, int64_t in_features, void* rows, int64_t first, int64_t last) {
    constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest whole number in the low mantissa bits
    typedef int8_t Codes __attribute__((vector_size(kLanes)));
    for (int64_t row = first; row < last; ++row) {
        char* codes = static_cast<char*>(rows) + row * quantised_row_bytes(in_features);
        char* scales = codes + in_features;
        char* sums = scales + in_features / kStep * sizeof(float);
        for (int64_t k = 0; k < in_features; k += kStep, scales += sizeof(float), sums += 2 * sizeof(int32_t)) {
            const float* from = x + row * in_features + k;
            const float largest = largest_of(from);
            const float scale = largest / 127.0f;
            const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
            int32_t of_groups[2];
            for (int64_t group = 0; group < 2; ++group) {
                IntVec sum = {};
                for (int64_t i = group * 16; i < group * 16 + 16; i += kLanes) {
                    const IntVec whole = bit_cast<IntVec>(load(from + i) * inverse + kRound) - 0x4b400000;
                    const Codes narrow = __builtin_convertvector(whole, Codes);
                    __builtin_memcpy(codes + k + i, &narrow, sizeof(narrow));
                    sum += whole;
                }
                of_groups[group] = 0;
                for (int lane = 0; lane < kLanes; ++lane) of_groups[group] += sum[lane];
            }
            __builtin_memcpy(scales, &scale, sizeof(scale));
            __builtin_memcpy(sums, of_groups, sizeof(of_groups));
        }
    }
}

void quantised_linear(const QuantisedLinearParams& p, int64_t first, int64_t last) {
    switch (p.kind) {
        case PanelKind::kQ4_0:
            return of_kind<0>(p, first, last);
        case PanelKind::kQ4_1:
            return of_kind<1>(p, first, last);
        case PanelKind::kQ5_0:
            return of_kind<2>(p, first, last);
        case PanelKind::kQ5_1:
            return of_kind<3>(p, first, last);
        case PanelKind::kQ8_0:
            return of_kind<4>(p, first, last);
        case PanelKind::kQ4_K:
            return of_kind<5>(p, first, last);
        case PanelKind::kQ5_K:
            return of_kind<6>(p, first, last);
        case PanelKind::kQ6_K:
            return of_kind<7>(p, first, last);
    }
}

}  // namespace tide::TIDE_ISA
