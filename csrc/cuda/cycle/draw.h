// Tokens drawn at random, and drawn drafts verified by the rejection rule. tide_core/kernels/reference/draw.py defines
// both in plain Torch. Both are one launch, take the caller's stream and allocate nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace tide::cuda {

constexpr int kDrawSettings = 5;  // of a row: temperature, top-k, top-p, min-p, least score of a draft
constexpr int kHeadNumbers = 4;   // best logit, logit of the last token kept, its place, sum of the weights kept

struct DrawParams {
    const void* logits;      // [rows, width]
    const double* settings;  // [kDrawSettings, rows]
    const double* numbers;   // [rows], in [0, 1)
    int64_t* places;         // [rows]
    double* heads;           // [rows, kHeadNumbers] what a token was drawn from
    int64_t rows;
    int64_t width;
    int64_t logits_stride;
    int64_t vocabulary;  // at least width: weights are scaled for so many tokens
};

struct VerifyDrawnParams {
    const void* logits;         // [tokens, vocabulary] at full depth
    const int64_t* sources;     // [tokens] draft * rows + row
    const int32_t* num_tokens;  // [1] the tokens that belong to rows; the others are left 0
    const int32_t* counts;      // [rows] drafts of each row
    const double* settings;     // [kDrawSettings, rows]
    const double* plain;        // [drafts + 1, rows] numbers for a token that no draft follows
    const double* accept;       // [drafts, rows] numbers to accept a draft with
    const double* residual;     // [drafts, rows] numbers to replace it with
    const float* scores;        // [drafts, rows]
    const int64_t* draft_ids;   // [drafts, rows]
    const void* draft_logits;   // [drafts, rows, shortlist], without gaps
    const double* draft_heads;  // [drafts, rows, kHeadNumbers]
    const int32_t* places;      // [vocabulary] where a token stands in the shortlist, -1: nowhere
    float* best;                // [tokens] the largest logit
    int64_t* ids;               // [tokens] the draft if it is accepted, else another token
    int64_t tokens;
    int64_t rows;
    int64_t drafts;
    int64_t vocabulary;
    int64_t shortlist;
    int64_t logits_stride;
};

void draw(DType dtype, const DrawParams& params, cudaStream_t stream);
void verify_drawn(DType dtype, const VerifyDrawnParams& params, cudaStream_t stream);

}  // namespace tide::cuda
