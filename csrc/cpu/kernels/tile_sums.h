// Products of weights and tokens in the tile unit: sums[output, token] += sum_k weight[output, k] * x[token, k].
//
// A tile holds 16 rows of 64 bytes. Weight rows go into it as they lie in memory; tokens come in pairs along k (see
// pack_tiles), which is how the unit wants its second operand. For each output the unit adds, in this order: the even
// and the odd products of a step of 32 along k, each in a chain of fused additions; then these two; then that to the
// sum so far. Neither the place in a tile nor the other rows and columns have a part in it. Batch invariance rests on
// this file.
#pragma once

#include "cpu/kernels/tile_ops.h"
#include "dtype.h"

namespace tide::TIDE_ISA {

constexpr int64_t kTile = 16;         // outputs of a tile, tokens of a tile
constexpr int64_t kStepDepth = 32;    // along k; of a weight row one cache line
constexpr int64_t kStepBytes = 64;    // of a weight row
constexpr int64_t kTileFloats = 256;  // sums of one tile, in rows of 16 tokens
constexpr int64_t kTileBytes = 1024;  // of weights or sums
constexpr int kMaxWeightTiles = 4;    // with one tile of tokens; two with two
constexpr int64_t kSumsRowBytes = 64;

// The tiles of this thread: 0 to 3 sums, 4 and 5 weights, 6 and 7 tokens, of which there are `width` in a tile. Given
// back at the end, so that the system need not save them when it switches threads.
class Tiles {
  public:
    explicit Tiles(int64_t width) {
        struct alignas(64) {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.rows[tile] = kTile;
            config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? kStepBytes : 4 * width);
        }
        finish_writes(&config);
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// kWeights tiles of weights below one another, next to one or two tiles of tokens. Of sums, one tile of weights has
// `token_tiles` neighbours in memory. The tile numbers must be literals.
template <int kWeights, int kTokens>
TIDE_INLINE void begin_sums() {
    _tile_zero(0);
    if constexpr (kWeights * kTokens > 1) _tile_zero(1);
    if constexpr (kWeights * kTokens > 2) _tile_zero(2);
    if constexpr (kWeights * kTokens > 3) _tile_zero(3);
}

template <int kWeights, int kTokens>
TIDE_INLINE float* sums_of(float* sums, int64_t token_tiles, int tile) {
    return sums + (tile / kTokens * token_tiles + tile % kTokens) * kTileFloats;
}

template <int kWeights, int kTokens>
TIDE_INLINE void load_sums(float* sums, int64_t token_tiles) {
    auto at = [&](int tile) { return sums_of<kWeights, kTokens>(sums, token_tiles, tile); };
    _tile_loadd(0, at(0), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 1) _tile_loadd(1, at(1), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 2) _tile_loadd(2, at(2), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 3) _tile_loadd(3, at(3), kSumsRowBytes);
}

template <int kWeights, int kTokens>
TIDE_INLINE void store_sums(float* sums, int64_t token_tiles) {
    auto at = [&](int tile) { return sums_of<kWeights, kTokens>(sums, token_tiles, tile); };
    _tile_stored(0, at(0), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 1) _tile_stored(1, at(1), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 2) _tile_stored(2, at(2), kSumsRowBytes);
    if constexpr (kWeights * kTokens > 3) _tile_stored(3, at(3), kSumsRowBytes);
}

// One step along k. `row_bytes` lie between weight rows, `token_bytes` between pairs of tokens.
template <int kWeights, int kTokens>
TIDE_INLINE void add_step(const char* weights, int64_t row_bytes, const char* tokens, const char* more_tokens,
                          int64_t token_bytes) {
    static_assert(kWeights <= kMaxWeightTiles && kWeights * kTokens <= 4);
    const int64_t tile_bytes = kTile * row_bytes;
    _tile_loadd(6, tokens, token_bytes);
    if constexpr (kTokens == 2) _tile_loadd(7, more_tokens, token_bytes);
    _tile_loadd(4, weights, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTokens == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kWeights > 1) {
        _tile_loadd(5, weights + tile_bytes, row_bytes);
        if constexpr (kTokens == 2) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbf16ps(1, 5, 6);
        }
    }
    if constexpr (kWeights > 2) {
        _tile_loadd(4, weights + 2 * tile_bytes, row_bytes);
        _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kWeights > 3) {
        _tile_loadd(5, weights + 3 * tile_bytes, row_bytes);
        _tile_dpbf16ps(3, 5, 6);
    }
}

// Weights at an edge, where a tile would reach past the last row or column: `rows` x `depth` of them, with zeros up to
// whole tiles.
TIDE_INLINE void copy_edge(const char* weights, int64_t row_bytes, int64_t rows, int64_t depth, char* edge,
                           int64_t edge_rows) {
    __builtin_memset(edge, 0, edge_rows * kStepBytes);
    for (int64_t row = 0; row < rows; ++row)
        __builtin_memcpy(edge + row * kStepBytes, weights + row * row_bytes, depth * sizeof(BFloat16));
    finish_writes(edge);
}

}  // namespace tide::TIDE_ISA
