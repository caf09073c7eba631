// All indices of a cycle from what the host says of its rows, and where they go on. One CTA, a thread for each row.
#include "cuda/block.cuh"
#include "cuda/launch.h"
#include "cuda/plan_cycle.h"

namespace tide::cuda {
namespace {

constexpr int32_t kKeepsDrafts = 1;  // how a row may leave early: its drafts are kept where full depth says the same

// Slots, rows and tokens are counted in 32 bits here: what is wider takes several times as long to divide.
struct Row {
    const int32_t* blocks;
    int32_t block_size;

    // Where a position lies in the pool.
    __device__ int32_t slot(int32_t position) const {
        const int32_t block = position / block_size;
        return blocks[block] * block_size + (position - block * block_size);
    }
};

// The sum of `count` over this thread's row and those before it, and the same of all rows in `sums`.
__device__ int32_t scan(int32_t count, int32_t* sums) {
    __shared__ int32_t of_warps[kMostCycleRows / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int32_t sum = count;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int32_t before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == kWarp - 1) of_warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += of_warps[w];
    sums[threadIdx.x] = sum;
    __syncthreads();
    return sum;
}

// A branch writes into blocks of its own from the newest token on. What lies before that in the first of them is copied
// there, and what the branch has written is copied to the row if it was right.
struct Branch {
    const int32_t* own;  // the blocks of the row itself
    int32_t* mine;
    int32_t block_size;

    __device__ void take_blocks(int32_t start, int32_t end, int32_t first_spare) const {
        const int32_t first = start / block_size;
        for (int32_t block = first; block <= end / block_size; ++block) mine[block] = first_spare + block - first;
    }
    // Pairs of slots, [2, width] from and to.
    __device__ void copy_before(int32_t start, int32_t* pairs, int32_t width) const {
        const int32_t block = start / block_size, from = own[block] * block_size, to = mine[block] * block_size;
        for (int32_t i = 0; i < start - block * block_size; ++i) {
            pairs[i] = from + i;
            pairs[width + i] = to + i;
        }
    }
};

__global__ void __launch_bounds__(kMostCycleRows) plan_cycle_kernel(PlanCycleParams p) {
    __shared__ int32_t sums[kMostCycleRows];
    let_next_start();
    wait_for_previous();
    const int32_t rows = static_cast<int32_t>(p.rows), drafts = static_cast<int32_t>(p.drafts), r = threadIdx.x;
    const int32_t tokens = rows * (drafts + 1), block_size = static_cast<int32_t>(p.block_size);
    const int32_t branches = static_cast<int32_t>(p.branches);
    const bool exists = r < rows;
    int32_t newest = exists ? p.about[r] : 0, start = exists ? p.about[rows + r] : 0;
    const int32_t count = exists ? p.about[2 * rows + r] : -1, tracked = exists ? p.about[3 * rows + r] : 0;
    if (start < 0) {  // as the cycle before left it, at this place
        const int32_t place = -1 - start;
        newest = p.carried[place];
        start = p.carried[kMostCycleRows + place];
    }
    const int32_t first = r - r % branches;  // the row itself, of which this may be a branch
    const bool is_branch = count >= 0 && r > first;
    const Branch branch = {p.tables + first * p.blocks, p.tables + r * p.blocks, block_size};
    if (is_branch) {
        const int32_t number = r / branches * (branches - 1) + r - first - 1;
        branch.take_blocks(start, start + count, static_cast<int32_t>(p.first_spare) + kBlocksPerBranch * number);
    }
    const Row row = {p.tables + r * p.blocks, block_size};

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
    int32_t* copies = lens + rows;  // [2, rows * block_size]
    const int32_t num_copies = rows * block_size;
    int32_t* returns = copies + 2 * num_copies;  // [4, tokens]

    // 1. The draft passes: one token of every row that still drafts.
    if (exists) {
        newest_ids[r] = newest;
        draft_deep_slots[r] = count >= 0 && start > 0 ? row.slot(start - 1) : 0;
    }
    for (int32_t ahead = 0; ahead < drafts; ++ahead) {
        const bool drafting = count > ahead;
        const int active = __syncthreads_count(drafting);
        if (!exists) continue;
        const int32_t at = ahead * rows + r, place = drafting ? start + ahead : 0;
        draft_positions[at] = place;
        draft_slots[at] = drafting ? row.slot(place) : -1;
        draft_distances[at] = count >= 0 && start > 0 ? ahead + 1 : 0;
        draft_lens[at] = drafting ? place + 1 : 0;
        int32_t* begins = draft_starts + ahead * (rows + 1);
        if (r == 0) begins[0] = 0;
        begins[r + 1] = r + 1 < active ? r + 1 : active;
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
        const int32_t at = begin + ahead, place = start + ahead, slot = row.slot(place);
        positions[at] = place;
        slots[at] = slot;
        sources[at] = ahead * rows + r;
        kept_slots[at] = tracked ? slot : -1;
        deep_slots[at] = place > 0 ? row.slot(place - 1) : row.slot(0);
        distances[at] = place > 0;
    }
    for (int32_t at = total + r; at < tokens; at += kMostCycleRows) {
        positions[at] = sources[at] = deep_slots[at] = distances[at] = 0;
        slots[at] = kept_slots[at] = -1;
    }

    // 3. Branches: the way there and back.
    if (branches <= 1) return;
    for (int32_t at = r; at < 2 * num_copies; at += kMostCycleRows) copies[at] = -1;
    for (int32_t at = r; at < 4 * tokens; at += kMostCycleRows) returns[at] = at < 2 * tokens ? -1 : 0;
    __syncthreads();
    if (!is_branch) return;
    branch.copy_before(start, copies + r * block_size, num_copies);
    if (tracked != kKeepsDrafts) return;
    const Row own = {branch.own, block_size};
    for (int32_t ahead = 0; ahead <= count; ++ahead) {
        const int32_t at = begin + ahead;
        returns[at] = row.slot(start + ahead);
        returns[tokens + at] = own.slot(start + ahead);
        returns[2 * tokens + at] = sums[first] - (count + 1);  // where it is said what follows the newest token
        returns[3 * tokens + at] = r;                          // where the branch has tried a token
    }
}

__global__ void __launch_bounds__(kMostCycleRows) carry_on_kernel(CarryOnParams p) {
    wait_for_previous();
    let_next_start();
    const int32_t rows = static_cast<int32_t>(p.rows), r = threadIdx.x;
    const int32_t branches = static_cast<int32_t>(p.branches);
    if (r >= rows) return;
    const int32_t count = p.about[2 * rows + r];
    int64_t token = 0, position = 0;
    if (count >= 0) {
        const int32_t first = r - r % branches;
        const int64_t right = p.following[p.starts[first]];
        int32_t place = first;
        if (p.about[3 * rows + r] == kKeepsDrafts) {
            for (int32_t branch = first + branches - 1; branch >= first; --branch)
                if (p.drafts > 0 && p.drafted[branch] == right) place = branch;
        }
        const int32_t begin = p.starts[place];
        int32_t taken = 0;
        while (taken < count && p.drafted[taken * rows + place] == p.following[begin + taken]) ++taken;
        token = p.following[begin + taken];
        position = p.positions[begin] + taken + 1;
    }
    p.carried[r] = static_cast<int32_t>(token);
    p.carried[kMostCycleRows + r] = static_cast<int32_t>(position);
    p.next[r] = token;
    p.next[rows + r] = position;
}

}  // namespace

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    launch("plan_cycle", plan_cycle_kernel, LaunchShape{1, kMostCycleRows}, stream, params);
}

void carry_on(const CarryOnParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    launch("carry_on", carry_on_kernel, LaunchShape{1, kMostCycleRows}, stream, params);
}

}  // namespace tide::cuda
