// All indices of a cycle from the metadata of its rows, and the state of the rows for the next cycle. One CTA, a thread
// for each row.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/cycle/cycle.h"
#include "cuda/cycle/plan_layout.h"

namespace tide::cuda {
namespace {

constexpr int32_t kRowIfRight = 1;  // of the row metadata: the row may leave early

// The slots of a row's positions, one after another from a first one: one division, and a
// read for each block. Slots, rows and tokens are counted in 32 bits here: a wider number takes several times as long
// to divide.
class Walk {
  public:
    // A row that does not exist has no blocks: nothing is read.
    __device__ Walk(const int32_t* blocks, int32_t block_size, int32_t position, bool exists)
        : blocks_(blocks), block_size_(block_size), block_(position / block_size) {
        offset_ = position - block_ * block_size;
        base_ = exists ? blocks_[block_] * block_size_ : 0;
    }
    __device__ int32_t slot() const { return base_ + offset_; }
    // Of the position before; of the first one itself, where there is none.
    __device__ int32_t slot_before() const {
        if (offset_ > 0) return base_ + offset_ - 1;
        return block_ > 0 ? (blocks_[block_ - 1] + 1) * block_size_ - 1 : slot();
    }
    // To the next position, which must have a block.
    __device__ void step() {
        if (++offset_ < block_size_) return;
        offset_ = 0;
        base_ = blocks_[++block_] * block_size_;
    }

  private:
    const int32_t* blocks_;
    int32_t block_size_, block_, offset_, base_;
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
    int32_t newest = exists ? p.row_meta[r] : 0, start = exists ? p.row_meta[rows + r] : 0;
    const int32_t count = exists ? p.row_meta[2 * rows + r] : -1, tracked = exists ? p.row_meta[3 * rows + r] : 0;
    if (start < 0) {  // as the cycle before left it, at this place
        const int32_t place = -1 - start;
        newest = p.next_state[place];
        start = p.next_state[kMostCycleRows + place];
    }
    const int32_t first = r - r % branches;  // the row itself, of which this may be a branch
    const bool is_branch = count >= 0 && r > first;
    const Branch branch = {p.tables + first * p.blocks, p.tables + r * p.blocks, block_size};
    if (is_branch) {
        const int32_t number = r / branches * (branches - 1) + r - first - 1;
        branch.take_blocks(start, start + count, static_cast<int32_t>(p.first_spare) + kBlocksPerBranch * number);
    }
    const Walk begins_at(p.tables + r * p.blocks, block_size, start, count >= 0);

    const CyclePlan plan(p.wide, p.narrow, rows, drafts, branches > 1 ? block_size : 0);
    const int32_t num_copies = rows * block_size;

    // 1. The draft passes: one token of every row that still drafts.
    if (exists) {
        plan.newest[r] = newest;
        plan.draft_deep_slots[r] = count >= 0 && start > 0 ? begins_at.slot_before() : 0;
    }
    Walk walk = begins_at;
    for (int32_t draft = 0; draft < drafts; ++draft) {
        const bool drafting = count > draft;
        const int active = __syncthreads_count(drafting);
        if (!exists) continue;
        const int32_t at = draft * rows + r, place = drafting ? start + draft : 0;
        plan.draft_positions[at] = place;
        plan.draft_slots[at] = drafting ? walk.slot() : -1;
        if (count > draft + 1) walk.step();
        plan.draft_distances[at] = count >= 0 && start > 0 ? draft + 1 : 0;
        plan.draft_lens[at] = drafting ? place + 1 : 0;
        int32_t* begins = plan.draft_starts + draft * (rows + 1);
        if (r == 0) begins[0] = 0;
        begins[r + 1] = r + 1 < active ? r + 1 : active;
    }

    // 2. The deep pass: the newest token of every row and what it drafts.
    const int32_t end = scan(count + 1, sums), begin = end - (count + 1);
    const int32_t total = sums[kMostCycleRows - 1];
    if (exists) {
        if (r == 0) plan.starts[0] = 0;
        plan.starts[r + 1] = end;
        plan.lens[r] = count < 0 ? 0 : start + count + 1;
        // After the newest token the answer has end - start - 1 more at most, and the last is not drafted.
        const int32_t most = max(p.row_meta[4 * rows + r] - start - 2, 0);
        plan.counting[r] = min(count, most);
    }
    walk = begins_at;
    int32_t before = count >= 0 ? walk.slot_before() : 0;
    for (int32_t draft = 0; draft <= count; ++draft) {
        const int32_t at = begin + draft, place = start + draft, slot = walk.slot();
        plan.positions[at] = place;
        plan.slots[at] = slot;
        plan.sources[at] = draft * rows + r;
        plan.kept_slots[at] = tracked ? slot : -1;
        plan.deep_slots[at] = before;
        plan.distances[at] = place > 0;
        before = slot;
        if (draft < count) walk.step();
    }
    for (int32_t at = total + r; at < tokens; at += kMostCycleRows) {
        plan.positions[at] = plan.sources[at] = plan.deep_slots[at] = plan.distances[at] = 0;
        plan.slots[at] = plan.kept_slots[at] = -1;
    }

    // 3. Branches: the way there and back.
    if (branches <= 1) return;
    for (int32_t at = r; at < 2 * num_copies; at += kMostCycleRows) plan.copies[at] = -1;
    for (int32_t at = r; at < 4 * tokens; at += kMostCycleRows) plan.returns[at] = at < 2 * tokens ? -1 : 0;
    __syncthreads();
    if (!is_branch) return;
    branch.copy_before(start, plan.copies + r * block_size, num_copies);
    if (tracked != kRowIfRight) return;
    Walk own(branch.own, block_size, start, true);
    walk = begins_at;
    for (int32_t draft = 0; draft <= count; ++draft) {
        const int32_t at = begin + draft;
        plan.returns[at] = walk.slot();
        plan.returns[tokens + at] = own.slot();
        plan.returns[2 * tokens + at] = sums[first] - (count + 1);  // index of the token that follows the newest one
        plan.returns[3 * tokens + at] = r;                          // index of the branch's first draft
        if (draft == count) break;
        walk.step();
        own.step();
    }
}

}  // namespace

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    launch("plan_cycle", plan_cycle_kernel, LaunchShape{1, kMostCycleRows}, stream, params);
}

}  // namespace tide::cuda
