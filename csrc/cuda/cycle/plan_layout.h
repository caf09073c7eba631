// Where the parts of a cycle's plan lie in its two buffers. tide_core/kernels/reference/cycle.py (CycleParts) has the
// same parts in the same order, and documents each; a test compares both.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TIDE_HOST_DEVICE __host__ __device__
#else
#define TIDE_HOST_DEVICE
#endif

namespace tide::cuda {

struct CyclePlan {
    // In the buffer of 64-bit numbers.
    int64_t* newest;            // [rows]
    int64_t* draft_deep_slots;  // [rows]
    int64_t* draft_positions;   // [drafts, rows]
    int64_t* draft_slots;       // [drafts, rows]
    int64_t* draft_distances;   // [drafts, rows]
    int64_t* positions;         // [tokens], from here on of the deep pass
    int64_t* slots;             // [tokens]
    int64_t* sources;           // [tokens]
    int64_t* kept_slots;        // [tokens]
    int64_t* deep_slots;        // [tokens]
    int64_t* distances;         // [tokens]
    int64_t* wide_end;
    // In the buffer of 32-bit numbers.
    int32_t* draft_starts;  // [drafts, rows + 1]
    int32_t* draft_lens;    // [drafts, rows]
    int32_t* starts;        // [rows + 1]
    int32_t* lens;          // [rows]
    int32_t* counting;      // [rows]
    int32_t* copies;        // [2, rows * branch_size]
    int32_t* returns;       // [4, tokens], or nothing without branches
    int32_t* narrow_end;

    // `branch_size`: slots of a block where rows have branches, else 0.
    TIDE_HOST_DEVICE CyclePlan(int64_t* wide, int32_t* narrow, int32_t rows, int32_t drafts, int32_t branch_size) {
        const int32_t per_draft = drafts * rows, tokens = rows * (drafts + 1);
        newest = wide;
        draft_deep_slots = newest + rows;
        draft_positions = draft_deep_slots + rows;
        draft_slots = draft_positions + per_draft;
        draft_distances = draft_slots + per_draft;
        positions = draft_distances + per_draft;
        slots = positions + tokens;
        sources = slots + tokens;
        kept_slots = sources + tokens;
        deep_slots = kept_slots + tokens;
        distances = deep_slots + tokens;
        wide_end = distances + tokens;
        draft_starts = narrow;
        draft_lens = draft_starts + drafts * (rows + 1);
        starts = draft_lens + per_draft;
        lens = starts + rows + 1;
        counting = lens + rows;
        copies = counting + rows;
        returns = copies + 2 * rows * branch_size;
        narrow_end = returns + (branch_size > 0 ? 4 * tokens : 0);
    }
};

}  // namespace tide::cuda
