// Slots of all pools at once, a warp for each slot of each pool.
#include "cuda/block.cuh"
#include "cuda/branches.h"
#include "cuda/launch.h"

namespace tide::cuda {
namespace {

constexpr int kWarps = 8;

template <typename Unit>
__global__ void __launch_bounds__(kWarps* kWarp) copy_slots_kernel(CopySlotsParams p) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % kWarp;
    const int64_t tasks = p.num_pools * p.count;
    for (int64_t task = blockIdx.x * kWarps + threadIdx.x / kWarp; task < tasks; task += gridDim.x * int64_t{kWarps}) {
        const int64_t copy = task / p.num_pools;
        const int64_t from = p.from[copy], to = p.to[copy];
        if (from < 0 || to < 0) continue;
        if (p.claims != nullptr && p.said[p.claims[copy]] != p.tried[p.claims[p.count + copy]]) continue;
        const SlotPool pool = p.pools[task - copy * p.num_pools];
        const int64_t units = pool.bytes / static_cast<int64_t>(sizeof(Unit));
        const auto place = [&](int64_t slot, int64_t head) {
            const int64_t block = slot / p.block_size;
            return reinterpret_cast<Unit*>(pool.data) +
                   ((block * pool.heads + head) * p.block_size + (slot - block * p.block_size)) * units;
        };
        for (int64_t i = lane; i < pool.heads * units; i += kWarp) {
            const int64_t head = i / units, at = i - head * units;
            place(to, head)[at] = place(from, head)[at];
        }
    }
}

template <typename Unit>
void launch_copy(const CopySlotsParams& params, cudaStream_t stream) {
    const int64_t ctas = (params.num_pools * params.count + kWarps - 1) / kWarps;
    launch("copy_slots", copy_slots_kernel<Unit>, LaunchShape{grid_of(ctas), kWarps * kWarp}, stream, params);
}

}  // namespace

void copy_slots(const CopySlotsParams& params, cudaStream_t stream) {
    if (params.num_pools <= 0 || params.count <= 0) return;
    switch (params.unit) {
        case 16:
            return launch_copy<uint4>(params, stream);
        case 4:
            return launch_copy<uint32_t>(params, stream);
        default:
            return launch_copy<uint16_t>(params, stream);
    }
}

}  // namespace tide::cuda
