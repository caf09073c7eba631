// The indices of a cycle, made on the device. tide_core/kernels/cycle_plan.py says what each part means.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tide::cuda {

constexpr int kMostCycleRows = 256;

struct PlanCycleParams {
    const int32_t* about;   // [4, rows]: newest token, its position, drafts (-1: no row), whether it may leave early
    const int32_t* tables;  // [rows, blocks]
    int64_t* wide;          // the 64-bit parts, one behind another
    int32_t* narrow;        // the 32-bit parts
    int64_t rows;           // at most kMostCycleRows, by falling number of drafts
    int64_t drafts;
    int64_t blocks;
    int64_t block_size;
};

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream);

// Drafts are said as places in the shortlist. `sources` counts newest tokens and drafts as one [drafts + 1, rows].
struct PendingTokensParams {
    const int64_t* newest;     // [rows]
    const int64_t* places;     // [drafts, rows]
    const int64_t* shortlist;  // token ids
    const int64_t* sources;    // [tokens]
    int64_t* drafted;          // [drafts, rows], the tokens at `places`
    int64_t* token_ids;        // [tokens], of the deep pass
    int64_t rows;
    int64_t drafts;
    int64_t tokens;
};

void pending_tokens(const PendingTokensParams& params, cudaStream_t stream);

}  // namespace tide::cuda
