#include "cpu/ops/panels.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kMostBlock = 256;
constexpr int64_t kPanelsPerPiece = 4;
constexpr int64_t kRowsPerPiece = 4;

const PanelFormat& format_of(PanelKind kind) {
    const int index = static_cast<int>(kind);
    if (index < 0 || index >= kNumPanelKinds) {
        throw std::invalid_argument("kind: got code " + std::to_string(index) + ", expected 0 to " +
                                    std::to_string(kNumPanelKinds - 1));
    }
    return kPanelFormats[index];
}

// One block of one row, taken apart: up to 256 codes along k.
struct Block {
    uint8_t halves[4];  // of the scale and the minimum
    uint8_t factors[kMostBlock / 16];
    uint8_t minima[kMostBlock / kStep];
    uint8_t codes[kMostBlock];
};

// Codes of nibbles: the low ones of `count`, then the high ones.
void read_nibbles(const uint8_t* nibbles, int count, uint8_t* codes) {
    for (int i = 0; i < count; ++i) codes[i] = nibbles[i] & 15;
    for (int i = 0; i < count; ++i) codes[i + count] = nibbles[i] >> 4;
}

// The eight 6-bit factors and minima of Q4_K and Q5_K: six bits of four pairs in 8 bytes, those of the other four in
// the 4 bytes after and in the two bits that are left above.
void read_factors(const uint8_t* packed, Block& block) {
    for (int i = 0; i < 4; ++i) {
        block.factors[i] = packed[i] & 63;
        block.minima[i] = packed[i + 4] & 63;
        block.factors[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | packed[i] >> 6 << 4);
        block.minima[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
    }
}

void read_q4_k(const uint8_t* from, Block& block) {
    std::memcpy(block.halves, from, 4);
    read_factors(from + 4, block);
    const uint8_t* nibbles = from + 16;
    for (int pair = 0; pair < 4; ++pair) read_nibbles(nibbles + 32 * pair, 32, block.codes + 64 * pair);
}

void read_q5_k(const uint8_t* from, Block& block) {
    std::memcpy(block.halves, from, 4);
    read_factors(from + 4, block);
    const uint8_t *high = from + 16, *nibbles = from + 48;
    for (int pair = 0; pair < 4; ++pair) read_nibbles(nibbles + 32 * pair, 32, block.codes + 64 * pair);
    for (int step = 0; step < 8; ++step) {
        uint8_t* codes = block.codes + 32 * step;
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (high[i] >> step & 1) << 4);
    }
}

void read_q6_k(const uint8_t* from, Block& block) {
    const uint8_t *low = from, *high = from + 128;
    std::memcpy(block.factors, from + 192, 16);
    std::memcpy(block.halves, from + 208, 2);
    for (int half = 0; half < 2; ++half, low += 64, high += 32) {
        read_nibbles(low, 64, block.codes + 128 * half);
        for (int quarter = 0; quarter < 4; ++quarter) {
            uint8_t* codes = block.codes + 128 * half + 32 * quarter;
            for (int i = 0; i < 32; ++i)
                codes[i] = static_cast<uint8_t>(codes[i] | (high[i] >> (2 * quarter) & 3) << 4);
        }
    }
}

void read_block(PanelKind kind, const uint8_t* from, Block& block) {
    const PanelFormat& format = format_of(kind);
    switch (kind) {
        case PanelKind::kQ4_K:
            return read_q4_k(from, block);
        case PanelKind::kQ5_K:
            return read_q5_k(from, block);
        case PanelKind::kQ6_K:
            return read_q6_k(from, block);
        default:
            break;
    }
    const int64_t halves = format.has_minima ? 4 : 2;
    std::memcpy(block.halves, from, halves);
    from += halves;
    if (format.bits == 8) {
        std::memcpy(block.codes, from, kStep);
        return;
    }
    uint32_t fifth = 0;
    if (format.bits == 5) {
        std::memcpy(&fifth, from, 4);
        from += 4;
    }
    read_nibbles(from, 16, block.codes);
    for (int i = 0; fifth && i < kStep; ++i)
        block.codes[i] = static_cast<uint8_t>(block.codes[i] | (fifth >> i & 1) << 4);
}

// Infinity and NaN have all bits of the exponent.
bool is_finite(const uint8_t* half) {
    return (half[1] & 0x7C) != 0x7C;
}

// Where what belongs to one output of a panel lies.
struct Place {
    const PanelFormat& format;
    uint8_t* panel;
    int64_t codes_offset;
    int64_t output;

    uint8_t* half(int64_t block, int which) const {
        return panel + block * format.scales_bytes() + (which * kPanel + output) * 2;
    }
    // which: the group of the step; behind the last group the minimum.
    uint8_t* factor(int64_t block, int64_t step, int which) const {
        return panel + block * format.scales_bytes() + format.halves_bytes() + step * format.factors_bytes() +
               which * kPanel + output;
    }
    uint8_t* step(int64_t step) const { return panel + codes_offset + step * format.step_bytes() + 4 * output; }
};

// Four codes of a line are one word; no code reaches into its neighbour.
void put_codes(const PanelFormat& format, const uint8_t* codes, uint8_t* step) {
    uint32_t lines[kLinesOfStep];
    std::memcpy(lines, codes, kStep);
    const auto put = [step](int64_t line, uint32_t word) { std::memcpy(step + line * kPanelLine, &word, 4); };
    if (format.bits == 8) {
        for (int64_t line = 0; line < kLinesOfStep; ++line) put(line, lines[line]);
        return;
    }
    constexpr uint32_t kLow = 0x0F0F0F0F;
    for (int64_t line = 0; line < 4; ++line) put(line, (lines[line] & kLow) | (lines[line + 4] & kLow) << 4);
    const int64_t bits = format.bits - 4;
    for (int64_t high = 0; high < bits; ++high) {
        const int64_t count = kLinesOfStep / bits;  // of lines whose high bits share one
        uint32_t word = 0;
        for (int64_t i = 0; i < count; ++i) word |= (lines[high * count + i] >> 4 & kLow) << (i * bits);
        put(4 + high, word);
    }
}

int take_code(const PanelFormat& format, const uint8_t* step, int64_t k) {
    const int64_t line = k / 4, i = k % 4;
    if (format.bits == 8) return static_cast<int8_t>(step[line * kPanelLine + i]);
    int code = step[line % 4 * kPanelLine + i] >> (line / 4 * 4) & 15;
    const int64_t bits = format.bits - 4;
    if (bits > 0) {
        const int64_t lines = 8 / bits;
        const int high = step[(4 + line / lines) * kPanelLine + i] >> (line % lines * bits);
        code |= (high & ((1 << bits) - 1)) << 4;
    }
    return code - format.offset;
}

void check_sizes(const PanelFormat& format, int64_t in_features, int64_t out_features) {
    require(in_features > 0 && in_features % (kStep * format.steps_of_block) == 0,
            "in_features: expected whole blocks of the kind");
    require(out_features > 0, "out_features: expected one or more");
}

}  // namespace

int64_t block_bytes(PanelKind kind) {
    return format_of(kind).block_bytes;
}

int64_t panels_bytes(PanelKind kind, int64_t in_features, int64_t out_features) {
    const PanelFormat& format = format_of(kind);
    check_sizes(format, in_features, out_features);
    return (out_features + kPanel - 1) / kPanel * format.panel_bytes(in_features);
}

bool pack_panels(PanelKind kind, const void* blocks, const int64_t* order, int64_t in_features, int64_t out_features,
                 void* panels) {
    const PanelFormat& format = format_of(kind);
    const int64_t panel_bytes = format.panel_bytes(in_features);
    check_sizes(format, in_features, out_features);
    const int64_t num_blocks = in_features / (kStep * format.steps_of_block);
    if (order) {
        for (int64_t i = 0; i < out_features; ++i)
            require(order[i] >= 0 && order[i] < out_features, "order: expected rows of the matrix");
    }
    std::atomic<bool> all_finite{true};
    parallel_for((out_features + kPanel - 1) / kPanel, kPanelsPerPiece, [&](int64_t first, int64_t last) {
        Block block;
        bool finite = true;
        // What no output of the last panel fills, and what lies between scales and codes.
        std::memset(static_cast<uint8_t*>(panels) + first * panel_bytes, 0, (last - first) * panel_bytes);
        for (int64_t output = first * kPanel; output < last * kPanel && output < out_features; ++output) {
            const int64_t row = order ? order[output] : output;
            const uint8_t* from = static_cast<const uint8_t*>(blocks) + row * num_blocks * format.block_bytes;
            const Place to = {format, static_cast<uint8_t*>(panels) + output / kPanel * panel_bytes,
                              format.codes_offset(in_features), output % kPanel};
            for (int64_t b = 0; b < num_blocks; ++b, from += format.block_bytes) {
                read_block(kind, from, block);
                for (int which = 0; which < 1 + format.has_minima; ++which) {
                    std::memcpy(to.half(b, which), block.halves + 2 * which, 2);
                    finite = finite && is_finite(block.halves + 2 * which);
                }
                for (int64_t step = 0; step < format.steps_of_block; ++step) {
                    if (format.has_factors()) {
                        for (int group = 0; group < format.groups_of_step; ++group)
                            *to.factor(b, step, group) = block.factors[step * format.groups_of_step + group];
                        if (format.has_minima) *to.factor(b, step, format.groups_of_step) = block.minima[step];
                    }
                    put_codes(format, block.codes + step * kStep, to.step(b * format.steps_of_block + step));
                }
            }
        }
        if (!finite) all_finite = false;
    });
    return all_finite;
}

void unpack_rows(PanelKind kind, const void* panels, int64_t in_features, int64_t out_features, const int64_t* ids,
                 int64_t count, float* y) {
    const PanelFormat& format = format_of(kind);
    check_sizes(format, in_features, out_features);
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= out_features) {
            throw std::out_of_range("ids[" + std::to_string(i) + "]: got " + std::to_string(ids[i]) +
                                    ", expected 0 to " + std::to_string(out_features - 1));
        }
    }
    const auto to_float = kernels().to_float[static_cast<int>(DType::kFloat16)];
    parallel_for(count, kRowsPerPiece, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            auto* panel =
                static_cast<uint8_t*>(const_cast<void*>(panels)) + ids[i] / kPanel * format.panel_bytes(in_features);
            const Place at = {format, panel, format.codes_offset(in_features), ids[i] % kPanel};
            for (int64_t step = 0; step < in_features / kStep; ++step) {
                const int64_t block = step / format.steps_of_block, of_block = step % format.steps_of_block;
                float scale = 0, minimum = 0;
                to_float(at.half(block, 0), &scale, 1);
                if (format.has_minima) to_float(at.half(block, 1), &minimum, 1);
                if (format.has_factors() && format.has_minima)
                    minimum *=
                        static_cast<float>(-static_cast<int>(*at.factor(block, of_block, format.groups_of_step)));
                for (int64_t k = 0; k < kStep; ++k) {
                    float of_group = scale;
                    if (format.has_factors()) {
                        const uint8_t factor =
                            *at.factor(block, of_block, static_cast<int>(k * format.groups_of_step / kStep));
                        of_group *= static_cast<float>(format.has_minima ? factor : static_cast<int8_t>(factor));
                    }
                    y[i * in_features + step * kStep + k] =
                        of_group * static_cast<float>(take_code(format, at.step(step), k)) + minimum;
                }
            }
        }
    });
}

}  // namespace tide
