#include "cpu/ops/linear_tiles.h"

#include <algorithm>
#include <vector>

#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kLineWords = kLineBytes / 4;
constexpr int64_t kPanelRows = 256;  // of x: its pairs stay in the shared cache while weights pass
constexpr int64_t kMinParallelTileWork =
    128 * 1024;                             // weights: with fewer, waking threads is not worth it (not measured)
constexpr int64_t kPiecesPerThread = 4;     // to even out threads that lose their core
constexpr int64_t kMaxColumnsOfSums = 128;  // their sums for 256 rows fill 128 KiB of the second-level cache
constexpr int64_t kPackedPerPiece = 64;     // units

int64_t columns_per_piece(const TileLinearParams& params) {
    const int64_t token_tiles = (params.rows + kTile - 1) / kTile;
    if (params.in_features * params.out_features * token_tiles < kMinParallelTileWork) return params.out_features;
    const int64_t share = params.out_features / (kPiecesPerThread * num_threads()) / kTile * kTile;
    const int64_t most = token_tiles > 2 ? kMaxColumnsOfSums : params.out_features;
    // Two tiles of weights with two of tokens read the least.
    const int64_t least = token_tiles > 1 && params.out_features >= 2 * kTile * num_threads() ? 2 * kTile : kTile;
    return std::clamp(token_tiles > 1 ? share / (2 * kTile) * (2 * kTile) : share, least, std::max(least, most));
}

// From the next cache line on: a tile's row that lies in two of them is loaded twice.
template <typename T>
T* next_line(T* memory) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + kLineBytes - 1) / kLineBytes * kLineBytes);
}

}  // namespace

void linear_in_tiles(const TileLinear& tiles, const BFloat16* x, const BFloat16* weight, const BFloat16* bias,
                     BFloat16* y, int64_t rows, int64_t in_features, int64_t out_features) {
    thread_local std::vector<uint32_t> memory;
    for (int64_t row = 0; row < rows; row += kPanelRows) {
        const int64_t count = std::min(kPanelRows, rows - row);
        const int64_t words = tiles.packed_words(count, in_features) + kLineWords;
        if (static_cast<int64_t>(memory.size()) < words) memory.resize(words);
        const TileLinearParams params = {
            x + row * in_features, next_line(memory.data()), weight, bias, y + row * out_features, count, in_features,
            out_features};
        parallel_for(tiles.pack_units(count, in_features), kPackedPerPiece,
                     [&](int64_t first, int64_t last) { tiles.pack(params, first, last); });
        const int64_t columns = columns_per_piece(params);
        parallel_for(out_features, columns, [&](int64_t first, int64_t last) {
            for (int64_t at = first; at < last; at += columns) {  // one thread alone is handed everything at once
                const int64_t end = std::min(last, at + columns);
                const int64_t floats = tiles.scratch_floats(count, in_features, end - at) + kLineWords;
                tiles.linear(params, at, end, next_line(thread_scratch(floats)));
            }
        });
    }
}

}  // namespace tide
