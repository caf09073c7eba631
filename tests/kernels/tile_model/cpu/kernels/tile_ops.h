// A software model of the tile unit, found by the compiler in place of csrc/cpu/kernels/tile_ops.h. It reads and writes
// exactly the bytes that the unit would, and adds in the documented order, with subnormal numbers as zero.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels/vec.h"

namespace tide::tile_model {

struct Unit {
    bool configured = false;
    int rows[8] = {};
    int row_bytes[8] = {};
    char data[8][16][64] = {};
};

inline thread_local Unit unit;

inline void expect(bool holds) {
    if (!holds) abort();
}

inline void load_config(const void* memory) {
    const unsigned char* config = static_cast<const unsigned char*>(memory);
    expect(config[0] == 1 && config[1] == 0);
    for (int i = 2; i < 16; ++i) expect(config[i] == 0);
    unit = Unit{};
    unit.configured = true;
    for (int tile = 0; tile < 8; ++tile) {
        unit.row_bytes[tile] = config[16 + 2 * tile] + 256 * config[17 + 2 * tile];
        unit.rows[tile] = config[48 + tile];
        expect(unit.rows[tile] <= 16 && unit.row_bytes[tile] <= 64 && unit.row_bytes[tile] % 4 == 0);
    }
    for (int i = 56; i < 64; ++i) expect(config[i] == 0);
}

inline void release() {
    unit = Unit{};
}

inline void zero(int tile) {
    expect(unit.configured);
    memset(unit.data[tile], 0, sizeof(unit.data[tile]));
}

inline void load(int tile, const void* base, long stride) {
    zero(tile);
    for (int row = 0; row < unit.rows[tile]; ++row)
        memcpy(unit.data[tile][row], static_cast<const char*>(base) + row * stride, unit.row_bytes[tile]);
}

inline void store(int tile, void* base, long stride) {
    expect(unit.configured);
    for (int row = 0; row < unit.rows[tile]; ++row)
        memcpy(static_cast<char*>(base) + row * stride, unit.data[tile][row], unit.row_bytes[tile]);
}

inline float flushed(float value) {
    return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value;
}

inline float number(const char* row, int index) {
    uint16_t upper;
    memcpy(&upper, row + 2 * index, sizeof(upper));
    const uint32_t bits = static_cast<uint32_t>(upper) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return flushed(value);
}

inline void multiply(int sums, int a, int b) {
    expect(unit.configured && unit.rows[sums] == unit.rows[a] && unit.row_bytes[sums] == unit.row_bytes[b] &&
           unit.row_bytes[a] == 4 * unit.rows[b]);
    for (int m = 0; m < unit.rows[sums]; ++m) {
        for (int n = 0; n < unit.row_bytes[sums] / 4; ++n) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < unit.rows[b]; ++k) {
                even = flushed(fmaf(number(unit.data[a][m], 2 * k), number(unit.data[b][k], 2 * n), even));
                odd = flushed(fmaf(number(unit.data[a][m], 2 * k + 1), number(unit.data[b][k], 2 * n + 1), odd));
            }
            char* place = unit.data[sums][m] + 4 * n;
            memcpy(&sum, place, sizeof(sum));
            sum = flushed(flushed(sum) + flushed(even + odd));
            memcpy(place, &sum, sizeof(sum));
        }
    }
}

}  // namespace tide::tile_model

namespace tide::TIDE_ISA {
inline void finish_writes(const void*) {}
}  // namespace tide::TIDE_ISA

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) ::tide::tile_model::load_config(memory)
#define _tile_release() ::tide::tile_model::release()
#define _tile_zero(tile) ::tide::tile_model::zero(tile)
#define _tile_loadd(tile, base, stride) ::tide::tile_model::load(tile, base, stride)
#define _tile_stored(tile, base, stride) ::tide::tile_model::store(tile, base, stride)
#define _tile_dpbf16ps(sums, a, b) ::tide::tile_model::multiply(sums, a, b)
