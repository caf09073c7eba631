// The rows whose flag is set, in order, by one CTA: flags are few, and a count that only the device knows must not be
// read by the host.
#include <algorithm>

#include "cuda/block.cuh"
#include "cuda/launch.h"
#include "cuda/small_ops.h"

namespace tide::cuda {
namespace {

constexpr int kMaxThreads = 1024;

__global__ void __launch_bounds__(kMaxThreads) compact_kernel(CompactParams p) {
    __shared__ int32_t counts[kMaxThreads / kWarp];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    let_next_start();
    wait_for_previous();
    const int64_t rows = count_rows(p.num_rows, p.rows);
    int64_t found = 0;  // in the rows before this round's; the same in every thread
    for (int64_t start = 0; start < rows; start += blockDim.x) {
        const int64_t row = start + threadIdx.x;
        const bool set = row < rows && p.flags[row] != 0;
        const unsigned votes = __ballot_sync(kAllLanes, set);
        if (lane == 0) counts[warp] = __popc(votes);
        __syncthreads();
        int64_t before = found;
        for (int other = 0; other < warps; ++other) {
            if (other < warp) before += counts[other];
            found += counts[other];
        }
        if (set) p.index[before + __popc(votes & ((1u << lane) - 1))] = row;
        __syncthreads();
    }
    if (threadIdx.x == 0) *p.count = static_cast<int32_t>(found);
}

}  // namespace

// With no rows the count is still written: whoever reads it must find 0.
void compact(const CompactParams& p, cudaStream_t stream) {
    const int64_t warps = std::clamp<int64_t>((p.rows + kWarp - 1) / kWarp, 1, kMaxThreads / kWarp);
    launch("compact", compact_kernel, LaunchShape{1, static_cast<int>(warps) * kWarp}, stream, p);
}

}  // namespace tide::cuda
