// From the drafts of a cycle to the tokens of its deep pass.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/cycle/cycle.h"

namespace tide::cuda {
namespace {

constexpr int kPendingThreads = 128;

// The token at a place of the shortlist; a suffix draft t is at -1 - t.
__device__ int64_t token_at(const PendingTokensParams& p, int64_t place) {
    return place < 0 ? -1 - place : p.shortlist[place];
}

__global__ void __launch_bounds__(kPendingThreads) pending_tokens_kernel(PendingTokensParams p) {
    wait_for_previous();
    let_next_start();  // the deep pass follows: it publishes
    const int64_t drafts = p.drafts * p.rows, count = drafts + p.tokens, step = int64_t{gridDim.x} * kPendingThreads;
    for (int64_t i = int64_t{blockIdx.x} * kPendingThreads + threadIdx.x; i < count; i += step) {
        if (i < drafts) {
            p.drafted[i] = token_at(p, p.places[i]);
            continue;
        }
        const int64_t source = p.sources[i - drafts];
        p.token_ids[i - drafts] = source < p.rows ? p.newest[source] : token_at(p, p.places[source - p.rows]);
    }
}

}  // namespace

void pending_tokens(const PendingTokensParams& params, cudaStream_t stream) {
    const int64_t count = params.drafts * params.rows + params.tokens;
    if (count <= 0) return;
    const LaunchShape shape = {grid_of((count + kPendingThreads - 1) / kPendingThreads), kPendingThreads, 0, 1,
                               Effect::kPublishes};
    launch("pending_tokens", pending_tokens_kernel, shape, stream, params);
}

}  // namespace tide::cuda
