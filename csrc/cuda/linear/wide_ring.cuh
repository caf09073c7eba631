// The memory of the linear for many rows, and the thread that has it filled.
//
//     stage:   64 weight rows x 128 bytes for each group of warps, then kTokens rows of x x 128 bytes; weights in E4M3
//              take 64 bytes a row
//     shared:  the stages, what is handed over, two barriers for each stage (full, free)
//
// A gated weight comes as 8 rows of the gate, the 8 rows of up that belong to them, and so on: a thread has both.
#pragma once

#include <algorithm>

#include "cuda/common/ptx/warpgroup.cuh"
#include "cuda/linear/kernels.h"
#include "cuda/linear/sums.cuh"

namespace tide::cuda {

// The CTAs of a cluster split the slices.
template <int kWarpgroups_, int kTokens_, int kSplit_, typename Params_ = LinearParams>
struct WideLayout {
    using Params = Params_;
    static constexpr bool kFp8 = kIsFp8<Params>;
    static constexpr int kWarpgroups = kWarpgroups_, kTokens = kTokens_, kSplit = kSplit_;
    static constexpr int kRows = kWarpgroups * kWarpgroupRows;
    static constexpr int kConsumers = kWarpgroups * kWarpgroupThreads;
    static constexpr int kSums = kTokens / 2;                           // of a thread, for one slice
    static constexpr int kOwnSlices = (kSlices + kSplit - 1) / kSplit;  // the first of three CTAs has one less
    static constexpr bool kEven = kSlices % kSplit == 0;
    static constexpr int kSumRegisters = kWarpgroups == 3 ? 64 : kSplit == 3 ? 192 : 128;
    static constexpr int kAtOnce = std::min(kOwnSlices, kSumRegisters / kSums);
    static constexpr int kPasses = kOwnSlices / kAtOnce;
    static_assert(kSplit == 1 || kPasses == 1);  // a CTA cannot add before the one before it is done
    // Bytes of a weight row that the second-level cache reads at once: what a later pass wants would leave it too
    // early.
    static constexpr int kRun = kAtOnce > 1 ? 256 : kLineBytes;
    // Sums are handed over a piece at a time where several CTAs do so one after another.
    static constexpr int kPieces = kSplit > 2 ? kSums / 16 : 1, kPiece = kSums / kPieces;
    static constexpr int kPieceBarriers = kSplit > 2 ? kPieces : 0;
    // Blocks whose products go on while the next one is awaited, or widened, for which E4M3 needs 16 registers more.
    static constexpr int kOpen = kFp8 ? kSplit > 1 : kTokens > 64;
    static constexpr int kRowBytes = kFp8 ? kBlockColumns : kLineBytes;  // of the weight in a stage
    static constexpr int kXOffset = kRows * kRowBytes;
    static constexpr int kStageBytes = kXOffset + kTokens * kLineBytes;
    static constexpr int kSumStride = kRows + 4;  // floats, where outputs are put in order; the 4 are for the banks
    static constexpr int kSumBytes = kTokens * kSumStride * 4;
    static constexpr int kPartialBytes = kSplit > 1 ? kSums * kConsumers * 4 : 0;
    // Registers are dealt out to four warps at a time. Where the products need many, the others give theirs away.
    static constexpr int kRegisters = (kAtOnce + (kPasses > 1)) * kSums + (kFp8 ? 56 + kOpen * 16 : 32);  // about
    static constexpr bool kGivesAway = kWarpgroups == 3 ? kRegisters > 144 : kWarpgroups == 2 && kRegisters > 160;
    static constexpr int kThreads = kConsumers + (kGivesAway ? kWarpgroupThreads : 32);

    static constexpr int kConsumerRegisters = kWarpgroups == 3 ? kThreeConsumerRegisters : kLinearConsumerRegisters;
    static constexpr int kProducerRegisters = kWarpgroups == 3 ? kThreeProducerRegisters : kLinearProducerRegisters;

    static __device__ int first_slice(int part) { return part * kSlices / kSplit; }
};

// The blocks of a CTA in the order in which they are summed.
template <typename Layout>
struct BlockWalk {
    int blocks, slice, end;  // blocks: of in_features; slice: that of the first place, which is before `end`
    int turn = 0, place = 0;

    __device__ BlockWalk(int blocks, int part)
        : blocks(blocks), slice(Layout::first_slice(part)), end(Layout::first_slice(part + 1)) {
        if (slice >= blocks) slice = end;
    }
    __device__ int block() const { return turn * kSlices + slice + place; }
    __device__ int column() const { return block() * kBlockColumns; }
    __device__ bool is_done() const { return slice >= end; }
    __device__ void next() {
        if (++place < Layout::kAtOnce && (Layout::kEven || slice + place < end) && block() < blocks) return;
        place = 0;
        ++turn;
        if (block() < blocks) return;
        turn = 0;
        slice += Layout::kAtOnce;
        if (slice >= blocks) slice = end;
    }
};

// A ring of stages: where the next one is, and how often the ring was gone round.
struct WideRing {
    uint32_t stages, full, count;  // addresses of the stages and of the barriers, and how many
    uint32_t slot = 0, phase = 0;

    __device__ uint32_t free() const { return full + count * 8; }
    __device__ void next() {
        const bool again = ++slot == count;
        slot = again ? 0 : slot;
        phase ^= again;
    }
};

// What a CTA works on, and where.
template <typename Layout>
struct WideWork {
    int part, blocks;  // part: of the slices, where they are split; blocks: of in_features
    int64_t first_column, first_token;
    WideRing ring;
};

// The producer: one thread requests all copies. The first stages' weights come before what earlier kernels wrote.
template <typename Layout>
__device__ inline void produce_blocks(const LinearParams& p, const CUtensorMap& weights, const CUtensorMap& xs,
                                      const WideWork<Layout>& work) {
    const int row = static_cast<int>(p.gated ? 0 : work.first_column);
    const int group = static_cast<int>(p.gated ? work.first_column / 8 : 0);
    const int token = static_cast<int>(work.first_token);
    WideRing ring = work.ring;
    BlockWalk<Layout> walk(work.blocks, work.part);
    const auto fetch_weight = [&](uint32_t slot, int column) {
        expect_bytes(ring.full + slot * 8, Layout::kStageBytes);
        copy_box(ring.stages + slot * Layout::kStageBytes, weights, column, row, 0, group, ring.full + slot * 8);
    };
    const auto fetch_x = [&](uint32_t slot, int column) {
        copy_box(ring.stages + slot * Layout::kStageBytes + Layout::kXOffset, xs, column, token, 0, 0,
                 ring.full + slot * 8);
    };
    fetch_map(weights);
    fetch_map(xs);
    BlockWalk<Layout> first_walk = walk;
    uint32_t begun = 0;
    for (; begun < ring.count && !first_walk.is_done(); ++begun, first_walk.next())
        fetch_weight(begun, first_walk.column());
    wait_for_previous();
    for (uint32_t slot = 0; slot < begun; ++slot, walk.next()) fetch_x(slot, walk.column());
    for (; !walk.is_done(); walk.next(), ring.next()) {
        wait_bytes(ring.free() + ring.slot * 8, ring.phase);
        fetch_weight(ring.slot, walk.column());
        fetch_x(ring.slot, walk.column());
    }
}

}  // namespace tide::cuda
