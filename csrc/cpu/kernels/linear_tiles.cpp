// y = x weight^T + bias in bfloat16 by the tile unit (see tile_sums.h), weights from memory as they lie.
//
// Few tokens: bound by reading weights. A strip of up to 64 weight rows, of one tile's if they are long, is walked from
// end to end beside one or two tiles of tokens, with the strip behind it fetched in the order it lies in memory.
// Many tokens: bound by the unit, if weights and tokens come from near. Columns and tokens meet in blocks along k, so
// that a block of weights stays in the first-level cache while all tokens pass; sums wait in memory between blocks. The
// blocks change nothing in the order of additions.
#include "cpu/kernels/linear_tiles.h"

#include "cpu/kernels/simd.h"
#include "cpu/kernels/tile_sums.h"
#include "cpu/kernels/transpose.h"

namespace tide::TIDE_ISA {
namespace {

constexpr int64_t kBlockSteps = 8;  // 16 KiB of 32 weight rows
// Of a strip that is walked from end to end. Longer ones were slower.
constexpr int64_t kMaxStripBytes = 64 * 1024;

TIDE_INLINE int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

TIDE_INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// How tokens are cut: tiles of `width` tokens, the last one filled up with zeros.
struct Cut {
    int64_t width;
    int64_t tiles;
    int64_t steps;
    int64_t step_bytes;   // of one tile's tokens
    int64_t block_steps;  // along k, before the sums are put aside

    Cut(int64_t rows, int64_t in_features)
        : width(smaller(rows, kTile)),
          tiles(ceil_div(rows, kTile)),
          steps(ceil_div(in_features, kStepDepth)),
          step_bytes(kTile * 4 * width),
          block_steps(tiles <= 2 ? steps : kBlockSteps) {}
    bool in_blocks() const { return block_steps < steps; }
};

// What a walk asks for while it goes: lines of 64 bytes, `line_step` bytes apart, and from `step` bytes further with
// every step along k.
struct Ahead {
    const char* next;
    int64_t line_step;
    int64_t step;
};

struct Strip {
    const char* weights;
    int64_t rows;  // 16 to a tile, or fewer in a strip of one tile
    int64_t depth;
    int64_t row_bytes;
};

// Steps [first, last) of a strip beside kTokens tiles of tokens.
template <int kWeights, int kTokens>
void add_steps(const Strip& strip, const Cut& cut, const char* tokens, int64_t first, int64_t last, const Ahead* ahead,
               float* sums) {
    const int64_t token_bytes = 4 * cut.width;
    const char* more_tokens = tokens + cut.steps * cut.step_bytes;
    if (first == 0)
        begin_sums<kWeights, kTokens>();
    else
        load_sums<kWeights, kTokens>(sums, cut.tiles);
    const bool whole_rows = strip.rows == kWeights * kTile;
    const int64_t direct = whole_rows ? smaller(last, strip.depth / kStepDepth) : first;
    int64_t step = first;
    for (; step < direct; ++step) {
        if (ahead) {
            const char* next = ahead->next + (step - first) * ahead->step;
            for (int64_t line = 0; line < kWeights * kTile; ++line)
                __builtin_prefetch(next + line * ahead->line_step, 0, 2);
        }
        add_step<kWeights, kTokens>(strip.weights + step * kStepBytes, strip.row_bytes, tokens + step * cut.step_bytes,
                                    more_tokens + step * cut.step_bytes, token_bytes);
    }
    for (; step < last; ++step) {
        alignas(64) char edge[kWeights * kTileBytes];
        copy_edge(strip.weights + step * kStepBytes, strip.row_bytes, strip.rows,
                  smaller(kStepDepth, strip.depth - step * kStepDepth), edge, kWeights * kTile);
        add_step<kWeights, kTokens>(edge, kStepBytes, tokens + step * cut.step_bytes,
                                    more_tokens + step * cut.step_bytes, token_bytes);
    }
    store_sums<kWeights, kTokens>(sums, cut.tiles);
}

// The outputs of one tile of sums: `columns` of them for `tokens` tokens.
void write_tile(const TileLinearParams& p, const float* sums, int64_t column, int64_t columns, int64_t token,
                int64_t tokens) {
    BFloat16 bias[kTile] = {};
    if (p.bias) __builtin_memcpy(bias, p.bias + column, columns * sizeof(BFloat16));
    Words16 rows[kTile];
    __builtin_memcpy(rows, sums, sizeof(rows));
    transpose(rows);
    for (int64_t i = 0; i < tokens; ++i) {
        float outputs[kTile];
        BFloat16 narrow[kTile];
        __builtin_memcpy(outputs, &rows[i], sizeof(outputs));
        for (int64_t at = 0; at < kTile; at += kLanes) store(narrow + at, load(outputs + at) + load(bias + at));
        BFloat16* y = p.y + (token + i) * p.out_features + column;
        if (columns == kTile)
            __builtin_memcpy(y, narrow, sizeof(narrow));
        else
            __builtin_memcpy(y, narrow, columns * sizeof(BFloat16));
    }
}

// All tokens beside one strip, steps [first, last); the outputs too, if these steps are the last.
template <int kWeights, int kTokens>
void add_strip(const TileLinearParams& p, const Cut& cut, const Strip& strip, int64_t column, int64_t first,
               int64_t last, const Ahead& ahead, float* sums) {
    const char* tokens = reinterpret_cast<const char*>(p.pairs);
    const int64_t tile_bytes = cut.steps * cut.step_bytes;
    int64_t tile = 0;
    for (; tile + kTokens <= cut.tiles; tile += kTokens)
        add_steps<kWeights, kTokens>(strip, cut, tokens + tile * tile_bytes, first, last, tile ? nullptr : &ahead,
                                     sums + tile * kTileFloats);
    if (tile < cut.tiles)
        add_steps<kWeights, 1>(strip, cut, tokens + tile * tile_bytes, first, last, nullptr, sums + tile * kTileFloats);
    if (last < cut.steps) return;
    finish_writes(sums);
    for (int64_t below = 0; below < strip.rows; below += kTile)
        for (int64_t t = 0; t < cut.tiles; ++t)
            write_tile(p, sums + (below / kTile * cut.tiles + t) * kTileFloats, column + below,
                       smaller(kTile, strip.rows - below), t * kTile, smaller(kTile, p.rows - t * kTile));
}

// How many weight rows the next strip takes of `left`: whole tiles, or what is left of one.
TIDE_INLINE int64_t strip_rows(int64_t left, const Cut& cut, int64_t row_bytes) {
    if (left < kTile) return left;
    const int64_t most = cut.tiles == 1 ? kMaxWeightTiles : kMaxWeightTiles / 2;
    int64_t tiles = smaller(most, left / kTile);
    while (!cut.in_blocks() && tiles > 1 && tiles * kTile * row_bytes > kMaxStripBytes) --tiles;
    return tiles * kTile;
}

}  // namespace

int64_t tile_packed_words(int64_t rows, int64_t in_features) {
    const Cut cut(rows, in_features);
    return cut.tiles * cut.steps * kTile * cut.width + kTile;  // the last row of pairs is written 16 wide
}

// With fewer than 16 tokens a row of pairs is written over the end of the one before it, so one thread must do it all.
int64_t tile_pack_units(int64_t rows, int64_t in_features) {
    const Cut cut(rows, in_features);
    return rows < kTile ? 1 : cut.tiles * cut.steps;
}

// Pairs of one step: 16 rows along k, in each the pair of every token of the tile.
static void pack_step(const TileLinearParams& p, const Cut& cut, int64_t tile, int64_t step) {
    Words16 words[kTile] = {};
    const int64_t depth = smaller(kStepDepth, p.in_features - step * kStepDepth);
    const int64_t tokens = smaller(cut.width, p.rows - tile * kTile);
    for (int64_t i = 0; i < tokens; ++i) {
        const BFloat16* x = p.x + (tile * kTile + i) * p.in_features + step * kStepDepth;
        if (depth == kStepDepth)
            __builtin_memcpy(&words[i], x, sizeof(words[i]));
        else
            __builtin_memcpy(&words[i], x, depth * sizeof(BFloat16));
    }
    transpose(words);
    uint32_t* to = p.pairs + (tile * cut.steps + step) * kTile * cut.width;
    for (int64_t pair = 0; pair < kTile; ++pair) __builtin_memcpy(to + pair * cut.width, &words[pair], 64);
}

void tile_pack(const TileLinearParams& p, int64_t first, int64_t last) {
    const Cut cut(p.rows, p.in_features);
    if (p.rows == 1) {  // already pairs; only the end of the last step is missing
        __builtin_memset(p.pairs, 0, cut.steps * cut.step_bytes);
        __builtin_memcpy(p.pairs, p.x, p.in_features * sizeof(BFloat16));
    } else if (p.rows < kTile) {
        for (int64_t step = 0; step < cut.steps; ++step) pack_step(p, cut, 0, step);
    } else {
        for (int64_t i = first; i < last; ++i) pack_step(p, cut, i / cut.steps, i % cut.steps);
    }
}

int64_t tile_scratch_floats(int64_t rows, int64_t in_features, int64_t columns) {
    const Cut cut(rows, in_features);
    const int64_t weight_tiles = cut.in_blocks() ? ceil_div(columns, kTile) : kMaxWeightTiles;
    return weight_tiles * cut.tiles * kTileFloats;
}

void tile_linear(const TileLinearParams& p, int64_t first, int64_t last, float* scratch) {
    const Cut cut(p.rows, p.in_features);
    const Tiles tiles(cut.width);
    const int64_t row_bytes = p.in_features * static_cast<int64_t>(sizeof(BFloat16));
    int64_t step = 0;
    do {
        const int64_t end = smaller(cut.steps, step + cut.block_steps);
        int64_t rows = 0;
        for (int64_t column = first; column < last; column += rows) {
            rows = strip_rows(last - column, cut, row_bytes);
            const char* weights = reinterpret_cast<const char*>(p.weight) + column * row_bytes;
            const Strip strip = {weights, rows, p.in_features, row_bytes};
            float* sums = scratch + (cut.in_blocks() ? (column - first) * cut.tiles * kTile : 0);
            const char* behind = weights + rows * row_bytes;
            const Ahead ahead = cut.in_blocks() ? Ahead{behind + step * kStepBytes, row_bytes, kStepBytes}
                                                : Ahead{behind, kStepBytes, rows * kStepBytes};
            const int64_t weight_tiles = ceil_div(rows, kTile);
            if (cut.tiles > 1) {
                weight_tiles == 2 ? add_strip<2, 2>(p, cut, strip, column, step, end, ahead, sums)
                                  : add_strip<1, 2>(p, cut, strip, column, step, end, ahead, sums);
            } else if (weight_tiles == 4) {
                add_strip<4, 1>(p, cut, strip, column, step, end, ahead, sums);
            } else if (weight_tiles == 3) {
                add_strip<3, 1>(p, cut, strip, column, step, end, ahead, sums);
            } else if (weight_tiles == 2) {
                add_strip<2, 1>(p, cut, strip, column, step, end, ahead, sums);
            } else {
                add_strip<1, 1>(p, cut, strip, column, step, end, ahead, sums);
            }
        }
        step = end;
    } while (step < cut.steps);
}

}  // namespace tide::TIDE_ISA
