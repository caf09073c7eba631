// The indices of a cycle, made on the device. tide_core/kernels/reference/cycle.py defines each part.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace tide::cuda {

constexpr int kMostCycleRows = 256;
constexpr int kBlocksPerBranch = 2;  // a branch has fewer drafts than a block has slots

struct PlanCycleParams {
    // [5, rows]: newest token, its position, drafts (-1: no row), whether it may leave early, where its answer ends
    const int32_t* row_meta;
    const int32_t* next_state;  // [3, kMostCycleRows]: tokens, positions, numbers of differing tokens, for rows whose
                                // own are not known yet
    int32_t* tables;            // [rows, blocks]; branches get blocks of their own here
    int64_t* wide;              // the 64-bit parts, one after another
    int32_t* narrow;            // the 32-bit parts
    int64_t rows;               // at most kMostCycleRows, by falling number of drafts
    int64_t drafts;
    int64_t blocks;
    int64_t block_size;
    int64_t branches;     // of each row, one after another
    int64_t first_spare;  // the first of the blocks that are for branches
};

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream);

// Drafts are given as places in the shortlist. `sources` counts newest tokens and drafts as one [drafts + 1,
// rows].
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

// What branches of a draft need: the n-th best token of a row, and K, V and states of some tokens in other slots.

// index[i] = where in row i of x the number stands that `ranks[i]` others are before: larger ones, and equal ones at
// lower places. NaN stands above every number.
struct NthBestParams {
    const void* x;         // [rows, width]
    const int32_t* ranks;  // [rows], each below width
    int64_t* index;        // [rows]
    int64_t rows;
    int64_t width;
    int64_t x_stride;
};

void nth_best(DType dtype, const NthBestParams& params, cudaStream_t stream);

// One pool [blocks, heads, block_size, bytes].
struct SlotPool {
    char* data;
    int64_t heads;
    int64_t bytes;  // of a head of a slot
};

// What lies in slot from[i] of every pool goes to slot to[i]; a pair with a negative slot is skipped. No slot that is
// written is read. With `claims` only where target_ids[claims[i]] is draft_ids[claims[count + i]].
struct CopySlotsParams {
    const SlotPool* pools;  // on the device
    const int32_t* from;    // [count]
    const int32_t* to;      // [count]
    const int32_t* claims;  // [2, count], or null
    const int64_t* target_ids;
    const int64_t* draft_ids;
    int64_t num_pools;
    int64_t count;
    int64_t block_size;
    int64_t unit;  // 16, 4 or 2: divides every `bytes` and address
};

void copy_slots(const CopySlotsParams& params, cudaStream_t stream);

}  // namespace tide::cuda
