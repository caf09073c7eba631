// Which drafts of a cycle are accepted. One CTA, a thread for each row.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/cycle/cycle.h"
#include "cuda/cycle/row_meta.h"

namespace tide::cuda {
namespace {

constexpr int32_t kIfRight = 1;  // of kLeaves: drafts are accepted only if full depth chooses the same tokens

// The scores that decide about the drafts of a row.
struct Thresholds {
    float min_score, exit_score;

    __device__ bool accepts(float score, bool equals) const {
        return isfinite(score) && score >= min_score && (score >= exit_score || equals);
    }
};

// The branch whose first draft is the token at full depth: the first of them, or the row itself if there is none.
__device__ int32_t chosen_branch(const AcceptDraftsParams& p, int32_t first) {
    const int64_t token = p.following[p.starts[first]];
    int32_t chosen = first;
    for (int32_t branch = first + static_cast<int32_t>(p.branches) - 1; branch >= first; --branch)
        if (p.drafted[branch] == token) chosen = branch;
    return chosen;
}

__device__ int32_t count_accepted(const AcceptDraftsParams& p, int32_t row, int32_t begin, int32_t count,
                                  const Thresholds& thresholds) {
    constexpr int32_t kAtOnce = 4;  // drafts that are loaded together
    const int32_t rows = static_cast<int32_t>(p.rows);
    int32_t accepted = 0;
    for (bool goes_on = true; goes_on && accepted < count;) {
        const int32_t from = accepted;
        int64_t drafted[kAtOnce], following[kAtOnce];
        float scores[kAtOnce];
#pragma unroll
        for (int32_t i = 0; i < kAtOnce; ++i) {
            const int32_t distance = min(from + i, count - 1);
            drafted[i] = p.drafted[distance * rows + row];
            scores[i] = p.scores[distance * rows + row];
            following[i] = p.following[begin + distance];
        }
#pragma unroll
        for (int32_t i = 0; i < kAtOnce; ++i) {
            goes_on = goes_on && from + i < count && thresholds.accepts(scores[i], drafted[i] == following[i]);
            accepted += goes_on;
        }
    }
    return accepted;
}

__global__ void __launch_bounds__(kMostCycleRows) accept_drafts_kernel(AcceptDraftsParams p) {
    wait_for_previous();
    let_next_start();
    const int32_t rows = static_cast<int32_t>(p.rows), r = threadIdx.x;
    if (r >= rows) return;
    const int32_t count = p.counting[r];
    int64_t token = 0, position = 0;
    if (count >= 0) {
        const int32_t first = r - r % static_cast<int32_t>(p.branches);
        const bool compares = p.row_meta[kLeaves * rows + r] == kIfRight && p.drafts > 0;
        const int32_t row = compares ? chosen_branch(p, first) : first;
        const int32_t begin = p.starts[row];
        const Thresholds thresholds = {__int_as_float(p.row_meta[kMinScore * rows + r]),
                                       __int_as_float(p.row_meta[kExitScore * rows + r])};
        const int32_t accepted = count_accepted(p, row, begin, count, thresholds);
        token = p.following[begin + accepted];
        position = p.positions[begin] + accepted + 1;
    }
    p.device_state[r] = static_cast<int32_t>(token);
    p.device_state[kMostCycleRows + r] = static_cast<int32_t>(position);
    p.next_state[r] = token;
    p.next_state[rows + r] = position;
}

}  // namespace

void accept_drafts(const AcceptDraftsParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    launch("accept_drafts", accept_drafts_kernel, LaunchShape{1, kMostCycleRows}, stream, params);
}

}  // namespace tide::cuda
