// Slots of all pools at once, a warp for each slot of each pool.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/cycle/cycle.h"

namespace tide::cuda {
namespace {

constexpr int kCopyWarps = 8;

template <typename Unit>
__global__ void __launch_bounds__(kCopyWarps* kWarp) copy_slots_kernel(CopySlotsParams p) {
    let_next_start();
    wait_for_previous();
    // Slots, pools and the units of a slot are counted in 32 bits, which are quick to divide; addresses are not.
    const int32_t lane = threadIdx.x % kWarp, block_size = static_cast<int32_t>(p.block_size);
    const uint32_t num_pools = static_cast<uint32_t>(p.num_pools), tasks = num_pools * static_cast<uint32_t>(p.count);
    for (uint32_t task = blockIdx.x * kCopyWarps + threadIdx.x / kWarp; task < tasks; task += gridDim.x * kCopyWarps) {
        const uint32_t copy = task / num_pools;
        const SlotPool pool = p.pools[task - copy * num_pools];
        const int32_t from = p.from[copy], to = p.to[copy];
        if (from < 0 || to < 0) continue;
        if (p.claims != nullptr && p.target_ids[p.claims[copy]] != p.draft_ids[p.claims[p.count + copy]]) continue;
        const int32_t units = static_cast<int32_t>(pool.bytes / static_cast<int64_t>(sizeof(Unit)));
        const auto place = [&](int32_t slot) {  // of the first head
            const int32_t block = slot / block_size;
            return reinterpret_cast<Unit*>(pool.data) +
                   (block * pool.heads * block_size + (slot - block * block_size)) * units;
        };
        const Unit* source = place(from);
        Unit* target = place(to);
        const int64_t head_units = int64_t{block_size} * units;
        for (int32_t i = lane; i < static_cast<int32_t>(pool.heads) * units; i += kWarp) {
            const int32_t head = i / units;
            const int64_t at = head * head_units + (i - head * units);
            target[at] = source[at];
        }
    }
}

template <typename Unit>
void launch_copy(const CopySlotsParams& params, cudaStream_t stream) {
    const int64_t ctas = (params.num_pools * params.count + kCopyWarps - 1) / kCopyWarps;
    launch("copy_slots", copy_slots_kernel<Unit>, LaunchShape{grid_of(ctas), kCopyWarps * kWarp}, stream, params);
}

}  // namespace

void copy_slots(const CopySlotsParams& params, cudaStream_t stream) {
    if (params.num_pools <= 0 || params.count <= 0) return;
    if (params.count > INT32_MAX / params.num_pools || params.block_size > INT32_MAX)
        throw std::runtime_error("copy_slots: slots times pools are at most 2^31 - 1");
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
