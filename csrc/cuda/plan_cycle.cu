// All indices of a cycle from what the host says of its rows. One CTA, a thread for each row.
#include "cuda/launch.h"
#include "cuda/plan_cycle.h"

namespace tide::cuda {
namespace {

struct Row {
    const int32_t* blocks;
    int64_t block_size;

    // Where a position lies in the pool.
    __device__ int64_t slot(int64_t position) const {
        const int64_t block = position / block_size;
        return blocks[block] * block_size + (position - block * block_size);
    }
};

// The sum of `count` over this thread's row and those before it.
__device__ int32_t scan(int32_t count, int32_t* sums) {
    const int r = threadIdx.x;
    sums[r] = count;
    __syncthreads();
    for (int step = 1; step < kMostCycleRows; step *= 2) {
        const int32_t before = r >= step ? sums[r - step] : 0;
        __syncthreads();
        sums[r] += before;
        __syncthreads();
    }
    return sums[r];
}

__global__ void __launch_bounds__(kMostCycleRows) plan_cycle_kernel(PlanCycleParams p) {
    __shared__ int32_t sums[kMostCycleRows];
    let_next_start();
    wait_for_previous();
    const int64_t rows = p.rows, drafts = p.drafts, tokens = rows * (drafts + 1), r = threadIdx.x;
    const bool exists = r < rows;
    const int32_t newest = exists ? p.about[r] : 0, start = exists ? p.about[rows + r] : 0,
                  count = exists ? p.about[2 * rows + r] : -1, tracked = exists ? p.about[3 * rows + r] : 0;
    const Row row = {p.tables + r * p.blocks, p.block_size};

    int64_t* newest_ids = p.wide;
    int64_t* draft_deep_slots = newest_ids + rows;
    int64_t* draft_positions = draft_deep_slots + rows;
    int64_t* draft_slots = draft_positions + drafts * rows;
    int64_t* draft_distances = draft_slots + drafts * rows;
    int64_t* positions = draft_distances + drafts * rows;
    int64_t* slots = positions + tokens;
    int64_t* sources = slots + tokens;
    int64_t* kept_slots = sources + tokens;
    int64_t* deep_slots = kept_slots + tokens;
    int64_t* distances = deep_slots + tokens;
    int32_t* draft_starts = p.narrow;
    int32_t* draft_lens = draft_starts + drafts * (rows + 1);
    int32_t* starts = draft_lens + drafts * rows;
    int32_t* lens = starts + rows + 1;

    // 1. The draft passes: one token of every row that still drafts.
    if (exists) {
        newest_ids[r] = newest;
        draft_deep_slots[r] = count >= 0 && start > 0 ? row.slot(start - 1) : 0;
    }
    for (int64_t ahead = 0; ahead < drafts; ++ahead) {
        const bool drafting = count > ahead;
        const int active = __syncthreads_count(drafting);
        if (!exists) continue;
        const int64_t at = ahead * rows + r, place = drafting ? start + ahead : 0;
        draft_positions[at] = place;
        draft_slots[at] = drafting ? row.slot(place) : -1;
        draft_distances[at] = count >= 0 && start > 0 ? ahead + 1 : 0;
        draft_lens[at] = drafting ? static_cast<int32_t>(place + 1) : 0;
        int32_t* begins = draft_starts + ahead * (rows + 1);
        if (r == 0) begins[0] = 0;
        begins[r + 1] = r + 1 < active ? static_cast<int32_t>(r + 1) : active;
    }

    // 2. The deep pass: the newest token of every row and what it drafts.
    const int32_t end = scan(count + 1, sums), begin = end - (count + 1);
    const int32_t total = sums[kMostCycleRows - 1];
    if (exists) {
        if (r == 0) starts[0] = 0;
        starts[r + 1] = end;
        lens[r] = count < 0 ? 0 : start + count + 1;
    }
    for (int32_t ahead = 0; ahead <= count; ++ahead) {
        const int64_t at = begin + ahead, place = start + ahead, slot = row.slot(place);
        positions[at] = place;
        slots[at] = slot;
        sources[at] = ahead * rows + r;
        kept_slots[at] = tracked ? slot : -1;
        deep_slots[at] = place > 0 ? row.slot(place - 1) : row.slot(0);
        distances[at] = place > 0;
    }
    for (int64_t at = total + r; at < tokens; at += kMostCycleRows) {
        positions[at] = sources[at] = deep_slots[at] = distances[at] = 0;
        slots[at] = kept_slots[at] = -1;
    }
}

}  // namespace

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    launch("plan_cycle", plan_cycle_kernel, LaunchShape{1, kMostCycleRows}, stream, params);
}

}  // namespace tide::cuda
