// Thresholds that were measured on the H200 (`bench/`). Another value changes the speed, never a result.
#pragma once

#include <cstdint>

namespace tide::cuda::tuning {

// The linear, few rows. A small linear is a matter of latency: its weight is less than this for each multiprocessor.
constexpr int64_t kSmallBytesPerSm = 64 * 1024;
constexpr int64_t kLongForSmall = 1024;  // in_features from which two row tiles share an x
constexpr int64_t kFewRowTiles = 48;     // up to which they do so as well
constexpr int64_t kLongRow = 8192;       // in_features from which 16 tokens are worth a cluster
constexpr int64_t kStagedFrom = 2048;    // in_features from which 5 to 8 tokens are read through shared memory
constexpr int64_t kRegisterXRows = 4;    // rows up to which x goes to registers

// The linear, many rows: the most rows that the tiles for few rows get.
constexpr int64_t kMostTileRows = 16;
constexpr int64_t kMostTileRowsOfSmall = 256;
constexpr int64_t kMostTileRowsOfPersistent = 8;
constexpr int64_t kMostTileRowsOfTall = 4;  // of a weight with kTallPerSm rows for each multiprocessor: an LM head
constexpr int64_t kTallPerSm = 512;
constexpr int kFewestStages = 4;  // of the ring of the persistent linear, which keep the memory busy

// The linear, many rows of a weight in half width (wide_bench): for each row of x that a CTA has, in_features from
// which three CTAs may split the slices. Handing on the sums of more rows has to pay.
constexpr int64_t kThirdsFromPerRow = 64;

// The linear of E4M3 weights (fp8_bench).
constexpr int64_t kShortXOfFp8 = 4096;  // in_features up to which all of 8 rows are read by every CTA of a tile
constexpr int64_t kMostLongXOfFp8 = 4;  // rows that are read likewise of a longer x
constexpr int64_t kMostThinRows = 128;  // of linear_thin, and from so many in_features on
constexpr int64_t kThinFrom = 1024;
constexpr int kThinBytesOfFour = 72 * 1024;  // of stages where four CTAs split the slices: with more it is slower

// Attention.
constexpr int kNarrowQueryHeads = 8;        // of a piece; more pieces than multiprocessors: wider ones
constexpr int64_t kMostCountedChunks = 64;  // that the last CTA adds up; more: another kernel does
constexpr int64_t kMostCountedPieces = 2;   // of a CTA: to count one takes long
constexpr int64_t kPlainCtasPerSm = 8;
constexpr int64_t kMostCombinedQueries = 16;       // of a row, added up at once
constexpr int kStreamStages = 4, kWideStages = 8;  // tiles in flight, at most

// Rows of a router are cut so that this share of the multiprocessors has work, in quarters.
constexpr int64_t kBusyQuarters = 3;

}  // namespace tide::cuda::tuning
