// Which kernel and which tile a linear gets. All of them give bitwise the same numbers; the measured thresholds are in
// common/tuning.h. Host code only.
#pragma once

#include "cuda/common/device.h"
#include "cuda/common/tuning.h"
#include "cuda/linear/linear.h"

namespace tide::cuda {

// Split-K: in_features is cut into kSlices slices that are summed apart and then added in order.
constexpr int kSlices = 8;

// A tile of the linear for few rows.
struct LinearTile {
    int row_tiles;        // 16 weight rows each, per CTA
    int token_tiles;      // 8 rows of x each, per CTA
    int cluster = 1;      // CTAs that share the slices among them
    bool staged = false;  // x goes through shared memory; always so with more than one token tile
    bool deep = false;    // more copies in flight, one CTA per multiprocessor

    constexpr bool operator==(const LinearTile& other) const {
        return row_tiles == other.row_tiles && token_tiles == other.token_tiles && cluster == other.cluster &&
               staged == other.staged && deep == other.deep;
    }
};

// Every tile that is compiled, for what has_kernel() says: those that are chosen, and no others.
constexpr LinearTile kLinearTiles[] = {{1, 1},
                                       {1, 1, 1, true},
                                       {2, 1},
                                       {2, 1, 1, true},
                                       {4, 1, 1, true},
                                       {1, 2, 1, true},
                                       {2, 2, 1, true},
                                       {4, 2, 1, true},
                                       {2, 4, 1, true},
                                       {4, 4, 1, true},
                                       {2, 8, 1, true},
                                       {3, 1, 1, true},
                                       {3, 8, 2, true},
                                       {3, 2, 1, true, true},
                                       {3, 4, 1, true, true},
                                       {3, 8, 1, true, true},
                                       {4, 2, 2, true, true},
                                       {4, 4, 2, true, true}};

// A norm needs registers, so some tiles are never chosen with one; two are for E4M3 weights alone.
constexpr bool has_kernel(const LinearTile& tile, bool normed, bool fp8) {
    if (tile == LinearTile{1, 1, 1, true} || tile == LinearTile{3, 1, 1, true}) return fp8 && !normed;
    return !normed || !(tile == LinearTile{2, 1, 1, true} || tile == LinearTile{4, 4, 1, true} ||
                        tile == LinearTile{3, 2, 1, true, true});
}

// A tile of the linear for many rows on sm_90a.
struct WideTile {
    int warpgroups;           // with 64 weight rows each: 1 (always split), 2 or 3 (never split)
    int tokens;               // rows of x per CTA: 32, 64 or 128 (never split in two)
    int split;                // CTAs that share the slices among them: 1, 2 or 3
    bool persistent = false;  // CTAs keep their x and take one tile of the weight after another

    constexpr bool operator==(const WideTile& other) const {
        return warpgroups == other.warpgroups && tokens == other.tokens && split == other.split &&
               persistent == other.persistent;
    }
};

// Every one that is compiled: those that choose_half_wide_tile() returns, and no others.
constexpr WideTile kWideLinearTiles[] = {{1, 32, 2},  {2, 32, 1},       {2, 32, 2},      {1, 64, 2},  {2, 64, 1},
                                         {2, 64, 2},  {2, 64, 3},       {3, 64, 1},      {2, 128, 1}, {2, 128, 3},
                                         {3, 128, 1}, {2, 32, 1, true}, {2, 64, 1, true}};

// E4M3 has registers for fewer sums, and is not for LM heads.
constexpr bool has_wide_kernel(const WideTile& tile, bool fp8) {
    return !fp8 || (tile.warpgroups < 3 && tile.split < 3 && !tile.persistent);
}

// A tile of the linear of E4M3 weights for up to 128 rows on sm_90a.
struct ThinTile {
    int row_groups, slice_groups;  // of four warps, per CTA: 64 weight rows each, or a share of the slices
    int cluster;                   // CTAs that share the slices among them
    int tokens;                    // rows of x per CTA: 8, 16, 32 or 64

    constexpr bool operator==(const ThinTile& other) const {
        return row_groups == other.row_groups && slice_groups == other.slice_groups && cluster == other.cluster &&
               tokens == other.tokens;
    }
};

// Every one that is compiled: those that choose_thin_tile() returns, and no others.
constexpr ThinTile kThinTiles[] = {{1, 2, 1, 8},  {1, 2, 2, 8},  {1, 2, 1, 16}, {1, 2, 2, 16}, {1, 2, 1, 32},
                                   {2, 1, 1, 32}, {1, 1, 4, 32}, {1, 2, 1, 64}, {1, 2, 2, 64}};

// Sums that a thread has, and with them whether two CTAs fit a multiprocessor by their registers, if also by memory.
constexpr int count_thin_sums(const ThinTile& tile) {
    return kSlices / (tile.slice_groups * tile.cluster) * tile.tokens / 2;
}
constexpr bool two_thin_fit(const ThinTile& tile) {
    return count_thin_sums(tile) <= 32 && tile.row_groups * tile.slice_groups <= 2;
}

constexpr int kWideBytes = 224 * 1024;  // of shared memory for a CTA, but for its barriers
constexpr int kThinBytes = 112 * 1024;  // the same of one of two CTAs

// Shared memory for the stages of a tile.
constexpr int thin_ring_bytes(const ThinTile& tile) {
    if (tile.cluster == 4) return tuning::kThinBytesOfFour;
    return two_thin_fit(tile) ? kThinBytes : kWideBytes;
}

// Stages of 128 weight rows, a line of 128 bytes each, that a persistent CTA has next to its x, as many lines for each
// 64 columns as it has tokens, and its ordered sums.
constexpr int64_t count_stages(int64_t in_features, int tokens) {
    return (kWideBytes - (in_features + 63) / 64 * tokens * 128 - tokens * (128 + 4) * 4) / (128 * 128);
}

// Any tile that is not deep fits a multiprocessor: not so with the 99 KiB of compute capability 8.6, 8.9 and 12.0,
// where the smallest one receives all rows, eight at a time.
inline bool fits_any_tile(const DeviceInfo& device) {
    return device.shared_bytes >= kSharedOfCta90 / 2;
}

// One CTA of the deep tiles fits a multiprocessor, or two of any other, and there are clusters: sm_90 and its like.
inline bool fits_deep_tiles(const DeviceInfo& device) {
    return device.arch >= kClusterArch && device.shared_bytes >= kSharedOfCta90;
}

inline bool has_wide_linear(const DeviceInfo& device) {
    return device.sm90a && fits_deep_tiles(device);
}

inline int64_t count_row_tiles(const LinearParams& p) {
    const int64_t tile_columns = p.gated ? 8 : 16;
    return (p.out_features + tile_columns - 1) / tile_columns;
}

// By its bytes in half width, also of a weight in E4M3: widening those costs time in every CTA that reads them.
inline bool is_small(const LinearParams& p, const DeviceInfo& device) {
    return count_row_tiles(p) * 16 * p.in_features * 2 < device.num_sms * tuning::kSmallBytesPerSm;
}

// The smallest tile with which no multiprocessor has more than two CTAs. The weight is then read once for every token
// tile, which the second-level cache bears. Where there are several token tiles, and a slice is long or outputs are
// few, two row tiles share an x.
inline LinearTile choose_small_tile(int64_t row_tiles, int64_t rows, int64_t in_features, int64_t num_sms) {
    constexpr LinearTile kBySize[] = {{1, 1}, {2, 1}, {2, 2, 1, true}};
    for (const LinearTile& tile : kBySize) {
        const int64_t row_blocks = (row_tiles + tile.row_tiles - 1) / tile.row_tiles;
        const int64_t tokens = int64_t{tile.token_tiles} * 8;
        const int64_t ctas = row_blocks * ((rows + tokens - 1) / tokens);
        const bool shares =
            in_features >= tuning::kLongForSmall || (row_tiles > 1 && row_tiles <= tuning::kFewRowTiles);
        const bool larger_is_better = tile.row_tiles == 1 && rows > 8 && shares;
        if (ctas <= 2 * num_sms && !larger_is_better) return tile;
    }
    return {2, 4, 1, true};
}

// The tile that should be fastest on this device, by how often the row tiles go round the multiprocessors.
inline LinearTile choose_tile(const LinearParams& p, const DeviceInfo& device) {
    const int64_t row_tiles = count_row_tiles(p), num_sms = device.num_sms;
    if (!fits_any_tile(device)) return {1, 1};
    const auto ctas = [&](int per_cta) { return (row_tiles + per_cta - 1) / per_cta; };
    if (is_small(p, device)) return choose_small_tile(row_tiles, p.rows, p.in_features, num_sms);
    const bool deep_fits = fits_deep_tiles(device), many = row_tiles > 4 * num_sms;
    const bool clusters_fit = deep_fits && 2 * ctas(4) <= num_sms;  // all of them at the same time
    const bool threes_fit = deep_fits && ctas(3) <= num_sms;
    if (p.rows <= 8) {
        if (deep_fits && p.rows > tuning::kRegisterXRows && p.in_features >= tuning::kStagedFrom) {
            if (many) return {4, 1, 1, true};
            if (row_tiles > 2 * num_sms && !p.norm) return {2, 1, 1, true};
        }
        return {2, 1};
    }
    if (p.rows <= 16) {
        if (clusters_fit && p.in_features >= tuning::kLongRow) return {4, 2, 2, true, true};
        if (row_tiles <= 2 * num_sms) return {1, 2, 1, true};
        if (threes_fit && !p.norm) return {3, 2, 1, true, true};
        return {many ? 4 : 2, 2, 1, true};
    }
    if (p.rows <= 32) {
        if (clusters_fit) return {4, 4, 2, true, true};
        if (threes_fit) return {3, 4, 1, true, true};
        return {many && !p.norm ? 4 : 2, 4, 1, true};
    }
    if (deep_fits && row_tiles <= 2 * num_sms) return {3, 8, 2, true};
    if (threes_fit) return {3, 8, 1, true, true};
    return {2, 8, 1, true};
}

// More tiles of the weight than multiprocessors, and an x that fits next to them.
inline bool can_persist(const LinearParams& p, int tokens, const DeviceInfo& device) {
    return !p.gated && p.out_features > device.num_sms * 128 &&
           count_stages(p.in_features, tokens) >= tuning::kFewestStages;
}

// Whether the kernels for many rows support it: no norm, and gated weights of whole 8 columns.
inline bool supports_wide(const LinearParams& p, const DeviceInfo& device) {
    return has_wide_linear(device) && !p.norm && !(p.gated && p.out_features % 8);
}

// Whether they should be faster than the tiles for few rows. An LM head of 8 rows took longer than one of 32 in
// profiles of whole steps: from a few rows on it goes the way of many.
inline bool is_wide(const LinearParams& p, const DeviceInfo& device) {
    int64_t most = can_persist(p, 32, device) ? tuning::kMostTileRowsOfPersistent : tuning::kMostTileRows;
    if (is_small(p, device)) most = tuning::kMostTileRowsOfSmall;
    if (p.out_features >= device.num_sms * tuning::kTallPerSm) most = tuning::kMostTileRowsOfTall;
    return p.rows > most && supports_wide(p, device);
}

// Whether of two blocks of 128 rows the second would be half empty, or more.
inline bool wastes_half(int64_t rows) {
    return rows > 128 && rows <= 192;
}

inline int64_t count_wide_ctas(const LinearParams& p, const WideTile& tile) {
    const int64_t weight_rows = p.gated ? 2 * p.out_features : p.out_features, rows = tile.warpgroups * 64;
    return (weight_rows + rows - 1) / rows * ((p.rows + tile.tokens - 1) / tile.tokens) * tile.split;
}

// The tile of a weight in E4M3: few tokens a CTA, and the slices split, while each CTA has a multiprocessor.
inline WideTile choose_wide_tile(const LinearParams& p, const DeviceInfo& device) {
    const auto fits = [&](const WideTile& tile) { return count_wide_ctas(p, tile) <= device.num_sms; };
    const int few = p.rows <= 32 ? 32 : 64;
    if (p.rows <= 64 && fits({1, few, 2})) return {1, few, 2};
    if (fits({2, few, 2})) return {2, few, 2};
    if (p.rows <= 64 || wastes_half(p.rows) || fits({2, 64, 1})) return {2, few, 1};
    return {2, 128, 1};
}

// That of a weight in half width. There are registers for three CTAs that split the slices, which they do where all of
// them still run at once and the columns are many; and for 192 weight rows a CTA, which pays where such tiles go round
// the multiprocessors at most two times for each three of those of 128. 32 tokens have none of these: not timed.
inline WideTile choose_half_wide_tile(const LinearParams& p, const DeviceInfo& device) {
    const auto fits = [&](const WideTile& tile) { return count_wide_ctas(p, tile) <= device.num_sms; };
    const int few = p.rows <= 32 ? 32 : 64, tokens = p.rows <= 64 || wastes_half(p.rows) ? few : 128;
    const bool is_long = tokens > 32 && p.in_features >= tuning::kThirdsFromPerRow * tokens;
    if (p.rows <= 64 && fits({1, few, 2})) return {1, few, 2};
    if (is_long && fits({2, tokens, 3})) return {2, tokens, 3};
    if (fits({2, few, 2})) return {2, few, 2};
    if (p.rows <= 64 && can_persist(p, few, device)) return {2, few, 1, true};
    if (tokens == 32 || fits({2, 64, 1})) return {2, few, 1};
    if (fits({3, 64, 1})) return {3, 64, 1};
    const auto rounds = [&](int groups) {
        return (count_wide_ctas(p, {groups, tokens, 1}) + device.num_sms - 1) / device.num_sms;
    };
    return {3 * rounds(3) <= 2 * rounds(2) ? 3 : 2, tokens, 1};
}

enum class Fp8Kernel { kTiles, kThin, kWide };

// Row tiles of a CTA with which all CTAs of a launch run at once, two on each multiprocessor.
inline int64_t row_tiles_at_once(const LinearParams& p, const DeviceInfo& device) {
    return (count_row_tiles(p) + 2 * device.num_sms - 1) / (2 * device.num_sms);
}

// Whether few rows of E4M3 weights, without a norm, should be fastest with so many row tiles a CTA: not if that is more
// than three, and not if x, which each CTA reads, is long.
inline bool runs_at_once(const Fp8LinearParams& p, const DeviceInfo& device) {
    const int64_t most = p.in_features <= tuning::kShortXOfFp8 ? 8 : tuning::kMostLongXOfFp8;
    return p.rows <= most && !p.norm && fits_deep_tiles(device) && !is_small(p, device) &&
           row_tiles_at_once(p, device) <= 3;
}

// Whether linear_thin should be faster than the kernels for many rows. It supports what they do, scales of 128 columns
// or more, and enough to read for stages of 128 columns. Where these have 128 rows of x a CTA they win.
inline bool is_thin(const Fp8LinearParams& p, const DeviceInfo& device) {
    return p.rows <= tuning::kMostThinRows && supports_wide(p, device) && p.scale_shift >= 7 &&
           p.in_features >= tuning::kThinFrom && !is_small(p, device) &&
           (p.rows <= 64 || choose_wide_tile(p, device).tokens <= 64);
}

inline Fp8Kernel choose_fp8_kernel(const Fp8LinearParams& p, const DeviceInfo& device) {
    if (runs_at_once(p, device)) return Fp8Kernel::kTiles;
    if (is_thin(p, device)) return Fp8Kernel::kThin;
    return is_wide(p, device) ? Fp8Kernel::kWide : Fp8Kernel::kTiles;
}

inline LinearTile choose_fp8_tile(const Fp8LinearParams& p, const DeviceInfo& device) {
    if (runs_at_once(p, device)) return {static_cast<int>(row_tiles_at_once(p, device)), 1, 1, true};
    return choose_tile(p, device);
}

// 64 weight rows a CTA, whose slices are split where all CTAs of a launch then still run at once. Up to 16 rows of x
// two CTAs share a multiprocessor. With 32 they do so if four split the slices; and 128 weight rows a CTA, which read x
// half as often, are better where they take no more rounds of the multiprocessors.
inline ThinTile choose_thin_tile(const LinearParams& p, const DeviceInfo& device) {
    const int64_t weight_rows = p.gated ? 2 * p.out_features : p.out_features, num_sms = device.num_sms;
    const int tokens = p.rows <= 8 ? 8 : p.rows <= 16 ? 16 : p.rows <= 32 ? 32 : 64;
    const int64_t ctas = (weight_rows + 63) / 64 * ((p.rows + tokens - 1) / tokens);
    if (tokens == 32) {
        if (4 * ctas <= 2 * num_sms) return {1, 1, 4, tokens};
        const auto rounds = [&](int64_t count) { return (count + num_sms - 1) / num_sms; };
        if (2 * rounds((ctas + 1) / 2) <= rounds(ctas)) return {2, 1, 1, tokens};
        return {1, 2, 1, tokens};
    }
    const int64_t at_once = tokens <= 16 ? 2 * num_sms : num_sms;
    return {1, 2, 2 * ctas <= at_once ? 2 : 1, tokens};
}

}  // namespace tide::cuda
