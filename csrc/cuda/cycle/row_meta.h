// Ops of a cycle that read the row metadata of the host, so that every kind of row can stay in a captured cycle. Each
// is one launch, takes the caller's stream and allocates nothing. tide_core/kernels/reference/cycle.py, draw.py and
// adjust.py define them in plain Torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace tide::cuda {

// The rows of row_meta, [kNumRowMeta, rows] int32.
enum RowMeta : int {
    kNewest,      // token id
    kStart,       // its position
    kDrafts,      // -1: no row
    kLeaves,      // whether the row may leave early
    kEnd,         // the position after the last that the answer can have
    kMinScore,    // float32 bits: a draft with a lower score does not count
    kPromptLen,   // tokens
    kAdjustSlot,  // of the state below, -1: none
    kLogprobs,    // the likeliest tokens to list with log-probabilities, -1: none, and no log-probability either
    kDiffering,   // tokens of the answer that full depth would not have chosen
    kMargin,      // float32 bits, of the row's budget
    kEpsilonLow,  // float64 bits, 0: the row has no budget
    kEpsilonHigh,
    kNumRowMeta,
};

// The token that follows the accepted drafts of each row, its position, and how many tokens of the answer differ from
// what full depth would have chosen. A draft that a budget keeps takes its place in `following`.
struct AcceptDraftsParams {
    const int32_t* row_meta;
    const int32_t* counting;   // [rows] drafts that may count, -1: no row
    const int32_t* starts;     // [rows + 1]
    const int64_t* positions;  // [tokens]
    const int64_t* drafted;    // [drafts, rows]
    const float* scores;       // [drafts, rows]
    int64_t* following;        // [tokens]
    const void* logits;        // [tokens, vocabulary]
    float* gaps;               // [tokens] of rows with a budget: of a kept draft, -1 for other tokens
    int32_t* device_state;     // [3, kMostCycleRows]
    int64_t* next_state;       // [2, rows], token and position in 64 bits
    int64_t rows;
    int64_t drafts;
    int64_t branches;
    int64_t logits_stride;
};

void accept_drafts(DType dtype, const AcceptDraftsParams& params, cudaStream_t stream);

constexpr int kDrawStreams = 4;  // of random numbers that a row has
constexpr int kDraftStream = 1;  // the one that drafts are drawn with

// The random numbers of every row in a cycle: those of tide_core/sampling/draw.py, bit for bit.
struct DrawNumbersParams {
    const int64_t* keys;       // [kDrawStreams, rows], bits of unsigned numbers
    const int32_t* starts;     // [rows + 1]
    const int64_t* positions;  // [tokens]
    const int32_t* row_meta;
    double* numbers;  // [kDrawStreams, distances, rows], in [0, 1)
    int64_t rows;
    int64_t distances;  // drafts + 1
};

void draw_numbers(const DrawNumbersParams& params, cudaStream_t stream);

constexpr int kMostEntries = 512;

// Logits as the requests of their rows ask for them. Row n belongs to the row sources[n] % rows, after as many of its
// drafts as sources[n] / rows. A row without a slot is copied.
struct AdjustLogitsParams {
    const void* logits;        // [count, width]
    const int64_t* columns;    // [width] token ids, or null: the columns are the tokens
    const int64_t* sources;    // [count]
    const int32_t* starts;     // [rows + 1]
    const int64_t* positions;  // [tokens]
    const int64_t* drafted;    // [drafts, rows]
    const int32_t* row_meta;
    const uint16_t* counts;      // [slots, vocabulary]: of the output, and the highest bit for a token of the prompt
    const double* penalties;     // [3, slots]: repetition, presence, frequency
    const int32_t* entry_ids;    // [slots, entries], -1: unused; at most kMostEntries
    const float* entry_values;   // [slots, entries], added in this order
    const int32_t* entry_until;  // [slots, entries]: for fewer output tokens than this
    float* out;                  // [count, width], maybe the logits themselves
    int64_t count;
    int64_t width;
    int64_t logits_stride;
    int64_t rows;
    int64_t slots;
    int64_t vocabulary;
    int64_t entries;
};

void adjust_logits(DType dtype, const AdjustLogitsParams& params, cudaStream_t stream);

// Counts the output tokens of a cycle, for rows with a slot.
struct CountOutputsParams {
    const int32_t* row_meta;
    const int32_t* starts;      // [rows + 1]
    const int64_t* positions;   // [tokens]
    const int64_t* following;   // [tokens]
    const int64_t* next_state;  // [2, rows]
    uint16_t* counts;           // [slots, vocabulary]
    const int64_t* drafted;     // [drafts, rows] to count instead of `following`, but for the last; or null
    int64_t rows;
    int64_t vocabulary;
};

void count_outputs(const CountOutputsParams& params, cudaStream_t stream);

constexpr int kMostLogprobs = 32;

// After every token of a row that wants it: the likeliest tokens, best first and equals by lower id, as many as the row
// lists; their log-probabilities, and that of the token that follows. Nothing is written for other rows.
struct TopLogprobsParams {
    const void* logits;        // [tokens, width]
    const int64_t* sources;    // [tokens] draft * rows + row
    const int32_t* starts;     // [rows + 1]
    const int32_t* row_meta;   // at most `most` are listed
    const int64_t* following;  // [tokens]
    int64_t* ids;              // [tokens, most]
    float* logprobs;           // [tokens, most]
    float* chosen;             // [tokens]
    int64_t tokens;
    int64_t rows;
    int64_t width;
    int64_t logits_stride;
    int64_t most;  // at most kMostLogprobs
};

void top_logprobs(DType dtype, const TopLogprobsParams& params, cudaStream_t stream);

}  // namespace tide::cuda
