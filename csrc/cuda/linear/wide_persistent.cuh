// The linear for many rows, where there are more tiles than multiprocessors and a row of x is short: an LM head. A CTA
// stays and takes one tile of the weight after another. Its x stays too, all columns of it; while the sums of a tile
// are put in order and written, the weight of the next is on its way.
//
//     shared:  stages of weight, 64 rows x 128 bytes for each group of warps; x, a block of columns after another;
//              the sums in order; two barriers for each stage (full, free), and that of x
//
// Products, sums and their order are those of linear_wide.cuh.
#pragma once

#include <iterator>
#include <stdexcept>
#include <utility>

#include "cuda/linear/wide.cuh"

namespace tide::cuda {

template <typename Layout>
struct PersistentLayout {
    static constexpr int kStageBytes = Layout::kRows * kLineBytes, kXBlockBytes = Layout::kTokens * kLineBytes;
    static_assert(Layout::kSplit == 1 && Layout::kOpen == 0, "a tile leaves all its stages");
    static_assert(Layout::kRows == 128, "as count_stages() has it");
};

// What a CTA works on: tiles `first`, `first + step`, ... of `tiles`, for one block of tokens.
struct PersistentWork {
    uint32_t first, step, tiles;
    int64_t first_token;
    int blocks;          // of in_features
    uint32_t x, x_full;  // addresses of x and its barrier
    WideRing ring;
};

// The producer: one thread requests all copies. The first stages' weights come before what earlier kernels wrote.
template <typename Layout>
__device__ inline void produce_tiles(const CUtensorMap& weights, const CUtensorMap& xs, const PersistentWork& work) {
    using Persistent = PersistentLayout<Layout>;
    WideRing ring = work.ring;
    BlockWalk<Layout> walk(work.blocks, 0);
    uint32_t tile = work.first;
    const auto fetch = [&](uint32_t slot) {  // the next block
        expect_bytes(ring.full + slot * 8, Persistent::kStageBytes);
        copy_box(ring.stages + slot * Persistent::kStageBytes, weights, walk.column(),
                 static_cast<int>(tile * Layout::kRows), 0, 0, ring.full + slot * 8);
        walk.next();
        if (!walk.is_done()) return;
        walk = BlockWalk<Layout>(work.blocks, 0);
        tile += work.step;
    };
    fetch_map(weights);
    fetch_map(xs);
    for (uint32_t slot = 0; slot < ring.count && tile < work.tiles; ++slot) fetch(slot);
    wait_for_previous();
    expect_bytes(work.x_full, work.blocks * Persistent::kXBlockBytes);
    for (int block = 0; block < work.blocks; ++block) {
        copy_box(work.x + block * Persistent::kXBlockBytes, xs, block * kBlockColumns,
                 static_cast<int>(work.first_token), 0, 0, work.x_full);
    }
    for (; tile < work.tiles; ring.next()) {
        wait_bytes(ring.free() + ring.slot * 8, ring.phase);
        fetch(ring.slot);
    }
}

// The consumer warps.
template <typename T, typename Layout>
__device__ inline void consume_tiles(const LinearParams& p, const PersistentWork& work, float* ordered) {
    using Persistent = PersistentLayout<Layout>;
    wait_for_previous();
    wait_bytes(work.x_full, 0);
    WideRing ring = work.ring;
    for (uint32_t tile = work.first; tile < work.tiles; tile += work.step) {
        float total[Layout::kSums];
        sum_blocks<T, Layout, Persistent::kStageBytes>(
            total, ring, 0, work.blocks,
            [&](int block, uint32_t) { return work.x + static_cast<uint32_t>(block) * Persistent::kXBlockBytes; },
            [](float (&sums)[Layout::kSums], int) {
#pragma unroll
                for (float& sum : sums) sum = 0.0f;
            },
            [](const float (&)[Layout::kSums], int) {});
        write_sums<T, Layout>(p, int64_t{tile} * Layout::kRows, work.first_token, total, ordered);
    }
}

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1)
    linear_persistent(const __grid_constant__ LinearParams p, const __grid_constant__ CUtensorMap weights,
                      const __grid_constant__ CUtensorMap xs, uint32_t token_blocks, uint32_t tiles, uint32_t stages) {
    using Persistent = PersistentLayout<Layout>;
    extern __shared__ __align__(1024) char memory[];
    const int blocks = count_blocks(p.in_features);
    const uint32_t base = shared_address(memory), x_offset = stages * Persistent::kStageBytes;
    const uint32_t sums_offset = x_offset + static_cast<uint32_t>(blocks) * Persistent::kXBlockBytes;
    const uint32_t barriers = base + sums_offset + Layout::kSumBytes;
    const PersistentWork work = {blockIdx.x / token_blocks,
                                 gridDim.x / token_blocks,
                                 tiles,
                                 int64_t{blockIdx.x % token_blocks} * Layout::kTokens,
                                 blocks,
                                 base + x_offset,
                                 barriers + 16 * stages,
                                 {base, barriers, stages}};
    if (threadIdx.x == Layout::kConsumers) {
        for (uint32_t i = 0; i < stages; ++i) {
            start_barrier(work.ring.full + i * 8);
            start_barrier(work.ring.free() + i * 8, Layout::kConsumers / 32);
        }
        start_barrier(work.x_full);
        show_barriers();
    }
    __syncthreads();
    let_next_start();
    if (threadIdx.x < Layout::kConsumers) {
        if constexpr (Layout::kGivesAway) take_registers<kLinearConsumerRegisters>();
        consume_tiles<T, Layout>(p, work, reinterpret_cast<float*>(memory + sums_offset));
    } else {
        if constexpr (Layout::kGivesAway) give_registers<kLinearProducerRegisters>();
        if (threadIdx.x == Layout::kConsumers) produce_tiles<Layout>(weights, xs, work);
        wait_for_previous();
    }
}

template <typename T, typename Layout>
void launch_persistent(const LinearParams& p, cudaStream_t stream) {
    using Persistent = PersistentLayout<Layout>;
    const int64_t stages = count_stages(p.in_features, Layout::kTokens);
    if (p.gated || stages < tuning::kFewestStages) throw std::runtime_error("linear: x does not fit next to the ring");
    const CUtensorMap weights = map_weights<T, Layout>(p), xs = map_x<T, Layout>(p);
    const int64_t tiles = (p.out_features + Layout::kRows - 1) / Layout::kRows;
    const int64_t token_blocks = (p.rows + Layout::kTokens - 1) / Layout::kTokens;
    const int64_t each = std::max<int64_t>(1, current_device("linear").num_sms / token_blocks);
    const int64_t x_bytes = int64_t{count_blocks(p.in_features)} * Persistent::kXBlockBytes;
    const int64_t bytes = stages * Persistent::kStageBytes + x_bytes + Layout::kSumBytes + 16 * stages + 8;
    const LaunchShape shape = {std::min(tiles, each) * token_blocks, Layout::kThreads, bytes, 1, Effect::kNone};
    launch("linear", linear_persistent<T, Layout>, shape, stream, p, weights, xs, static_cast<uint32_t>(token_blocks),
           static_cast<uint32_t>(tiles), static_cast<uint32_t>(stages));
}

// Whether tile kIndex of kWideLinearTiles is the one, and was launched.
template <typename T, typename Params, size_t kIndex>
bool launch_wide_if_chosen(const Params& p, const WideTile& tile, cudaStream_t stream) {
    constexpr WideTile kTile = kWideLinearTiles[kIndex];
    if constexpr (has_wide_kernel(kTile, kIsFp8<Params>)) {
        if (!(tile == kTile)) return false;
        using Layout = WideLayout<kTile.warpgroups, kTile.tokens, kTile.split, Params>;
        if constexpr (kTile.persistent) {
            launch_persistent<T, Layout>(p, stream);
        } else {
            launch_wide<T, Layout>(p, stream);
        }
        return true;
    }
    return false;
}

template <typename T, typename Params, size_t... kIndices>
bool launch_chosen_wide(const Params& p, const WideTile& tile, cudaStream_t stream, std::index_sequence<kIndices...>) {
    return (launch_wide_if_chosen<T, Params, kIndices>(p, tile, stream) || ...);
}

template <typename T, typename Params>
void launch_linear_wide(const Params& p, const WideTile& tile, cudaStream_t stream) {
    if (!launch_chosen_wide<T>(p, tile, stream, std::make_index_sequence<std::size(kWideLinearTiles)>()))
        throw std::logic_error("linear: a tile was chosen that is not built");
}

}  // namespace tide::cuda
