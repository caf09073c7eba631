// Which drafts of a cycle are accepted. One CTA, a thread for each row.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pack.cuh"
#include "cuda/cycle/cycle.h"
#include "cuda/cycle/row_meta.h"

namespace tide::cuda {
namespace {

constexpr int32_t kIfRight = 1;  // of kLeaves: the row may have branches
constexpr float kAgrees = -1.0f;

// What mode bounded may still emit though full depth chose another token: `keeps` of tide_core/exits/accept.py.
struct Budget {
    float margin;
    double epsilon;     // 0: there is no budget
    int32_t emitted;    // tokens of the answer before the first draft
    int32_t differing;  // those of them and of the accepted drafts that differ

    __device__ bool exists() const { return epsilon > 0.0; }
    __device__ bool has_place(int32_t accepted) const {
        return static_cast<double>(differing + 1) <= __dmul_rn(epsilon, static_cast<double>(emitted + accepted + 1));
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

// Whether a draft is kept that full depth would not have chosen. Writes its gap, if this thread `writes`.
template <typename T>
__device__ bool keeps(const AcceptDraftsParams& p, Budget& budget, int32_t begin, int32_t accepted, int64_t drafted,
                      int64_t following, bool writes) {
    if (!budget.exists() || !budget.has_place(accepted)) return false;
    const T* logits = static_cast<const T*>(p.logits) + (begin + accepted) * p.logits_stride;
    const float gap = __fsub_rn(to_float(logits[following]), to_float(logits[drafted]));
    if (!(gap <= budget.margin)) return false;  // nor if it is no number
    if (writes) p.gaps[begin + accepted] = gap;
    ++budget.differing;
    return true;
}

template <typename T>
__device__ int32_t count_accepted(const AcceptDraftsParams& p, Budget& budget, int32_t row, int32_t begin,
                                  int32_t count, float min_score, bool writes) {
    constexpr int32_t kAtOnce = 4;  // drafts that are loaded together
    const int32_t rows = static_cast<int32_t>(p.rows);
    int32_t accepted = 0;
    for (bool accepts = true; accepts && accepted < count;) {
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
            accepts =
                accepts && from + i < count && isfinite(scores[i]) && scores[i] >= min_score &&
                (drafted[i] == following[i] || keeps<T>(p, budget, begin, accepted, drafted[i], following[i], writes));
            accepted += accepts;
        }
    }
    return accepted;
}

template <typename T>
__global__ void __launch_bounds__(kMostCycleRows) accept_drafts_kernel(AcceptDraftsParams p) {
    wait_for_previous();
    let_next_start();
    const int32_t rows = static_cast<int32_t>(p.rows), r = threadIdx.x;
    const int32_t count = r < rows ? p.counting[r] : -1;
    const int32_t first = r - r % static_cast<int32_t>(p.branches);
    const auto meta = [&](int32_t part) { return p.row_meta[part * rows + r]; };
    int64_t token = 0, position = 0;
    int32_t accepted = 0, row = r, begin = 0;
    Budget budget = {};
    if (count >= 0) {
        const bool compares = meta(kLeaves) == kIfRight && p.drafts > 0;
        row = compares ? chosen_branch(p, first) : first;
        begin = p.starts[row];
        const int32_t start = meta(kStart), newest = static_cast<int32_t>(p.positions[begin]);
        budget.margin = __int_as_float(meta(kMargin));
        budget.epsilon = __hiloint2double(meta(kEpsilonHigh), meta(kEpsilonLow));
        budget.emitted = newest + 1 - meta(kPromptLen);
        budget.differing = start < 0 ? p.device_state[2 * kMostCycleRows + (-1 - start)] : meta(kDiffering);
        const bool writes = budget.exists() && r == first;  // all branches of a row decide the same
        for (int32_t i = 0; writes && i <= count; ++i) p.gaps[begin + i] = kAgrees;
        accepted = count_accepted<T>(p, budget, row, begin, count, __int_as_float(meta(kMinScore)), writes);
        token = p.following[begin + accepted];
        position = newest + accepted + 1;
    }
    __syncthreads();  // what follows is read above, by other branches and for rows that were elsewhere
    if (r >= rows) return;
    if (budget.exists() && count >= 0 && r == first)
        for (int32_t i = 0; i < accepted; ++i) p.following[begin + i] = p.drafted[i * rows + row];
    p.device_state[r] = static_cast<int32_t>(token);
    p.device_state[kMostCycleRows + r] = static_cast<int32_t>(position);
    p.device_state[2 * kMostCycleRows + r] = count < 0 ? 0 : budget.differing;
    p.next_state[r] = token;
    p.next_state[rows + r] = position;
}

}  // namespace

void accept_drafts(DType dtype, const AcceptDraftsParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    with_storage("accept_drafts", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("accept_drafts", accept_drafts_kernel<T>, LaunchShape{1, kMostCycleRows}, stream, params);
    });
}

}  // namespace tide::cuda
