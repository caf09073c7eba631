// The linear of E4M3 weights for up to 128 rows on sm_90a: as the one for many rows (wide.cuh), but no sum is waited
// for.
//
// A group of four warps has 64 weight rows and some neighbouring slices of them, all side by side in registers. Groups
// of a CTA, and CTAs of a cluster, share out rows and slices; in the end all sums are put into shared memory, and each
// output is added up over the slices in order. A stage has 128 columns, two slices, for each of the CTA's shares of
// slices:
//
//     weight rows x 128 bytes, then x, of two times 64 columns: tokens x 128 bytes
//
// What is multiplied lies in registers, widened from the stage, 64 columns at a time: those of one slice while the
// products of the other go on. Blocks that do not exist come as zeros.
#pragma once

#include <iterator>
#include <stdexcept>
#include <utility>

#include "cuda/linear/wide.cuh"

namespace tide::cuda {

constexpr int kThinColumns = 2 * kBlockColumns;  // of a stage

template <int kRowGroups_, int kSliceGroups_, int kCluster_, int kTokens_, typename Params_>
struct ThinLayout {
    using Params = Params_;
    static constexpr bool kFp8 = true;
    static constexpr int kRowGroups = kRowGroups_, kSliceGroups = kSliceGroups_, kCluster = kCluster_;
    static constexpr int kTokens = kTokens_;
    static constexpr int kRows = kRowGroups * kWarpgroupRows;
    static constexpr int kConsumers = kRowGroups * kSliceGroups * kWarpgroupThreads;
    static constexpr int kSums = kTokens / 2;                               // of a thread, for one slice
    static constexpr int kOwnSlices = kSlices / (kSliceGroups * kCluster);  // of a group
    static constexpr int kTurn = kOwnSlices / 2;                            // stages in which each has one block
    static constexpr int kCtasPerSm = two_thin_fit({kRowGroups, kSliceGroups, kCluster, kTokens}) ? 2 : 1;
    // As in WideLayout: of three groups of warps, two multiply and take the registers of the third.
    static constexpr bool kGivesAway = kCtasPerSm == 1 && kRowGroups * kSliceGroups == 2;
    static constexpr int kThreads = kConsumers + (kGivesAway ? kWarpgroupThreads : 32);
    static constexpr int kWeightBytes = kRows * kThinColumns;
    static constexpr int kXBytes = kTokens * kLineBytes;  // of 64 columns
    static constexpr int kShareBytes = kWeightBytes + 2 * kXBytes;
    static constexpr int kStageBytes = kSliceGroups * kShareBytes;
    static constexpr int kSumStride = kRows + 4;  // floats; the 4 are for the banks
    static constexpr int kSliceBytes = kTokens * kSumStride * 4;
    static constexpr int kSumBytes = kSlices / kCluster * kSliceBytes;
    static_assert(kOwnSlices % 2 == 0 && kWeightBytes % 1024 == 0 && kXBytes % 1024 == 0);
};

// Where a vector of 16 columns of a row lies in a stage: lines of 128 bytes, swizzled by the copy engine.
struct ThinStage {
    // What a lane names to load_matrices(): rows 0 to 7, then 8 to 15 of a row tile, of 16 columns, then of the
    // next 16.
    __device__ static uint32_t named(int lane) {
        return lane % 16 * kThinColumns + (lane / 16 ^ lane % 8) * kFp8Vector;
    }
    // To be joined by exclusive or, for the 32 columns `pair` of the 128.
    __device__ static uint32_t further(int pair) { return 2 * pair * kFp8Vector; }
};

template <typename Layout>
struct ThinWork {
    int rank, turns;  // of the cluster; stages of a CTA, kTurn each
    int64_t first_column, first_token;
    WideRing ring;

    __device__ int column(int step, int group) const {
        const int slice = (rank * Layout::kSliceGroups + group) * Layout::kOwnSlices + step % Layout::kTurn * 2;
        return step / Layout::kTurn * kStrideColumns + slice * kBlockColumns;
    }
};

// The producer: one thread requests all copies. The first stages' weights come before what earlier kernels wrote.
template <typename Layout>
__device__ inline void produce_thin(const LinearParams& p, const CUtensorMap& weights, const CUtensorMap& xs,
                                    const ThinWork<Layout>& work) {
    const int row = static_cast<int>(p.gated ? 0 : work.first_column);
    const int eight = static_cast<int>(p.gated ? work.first_column / 8 : 0);
    const int token = static_cast<int>(work.first_token), steps = work.turns * Layout::kTurn;
    WideRing ring = work.ring;
    const auto fetch_weight = [&](uint32_t slot, int step) {
        const uint32_t full = ring.full + slot * 8, to = ring.stages + slot * Layout::kStageBytes;
        expect_bytes(full, Layout::kStageBytes);
#pragma unroll
        for (int group = 0; group < Layout::kSliceGroups; ++group)
            copy_box(to + group * Layout::kShareBytes, weights, work.column(step, group), row, 0, eight, full);
    };
    const auto fetch_x = [&](uint32_t slot, int step) {
        const uint32_t full = ring.full + slot * 8, to = ring.stages + slot * Layout::kStageBytes;
#pragma unroll
        for (int group = 0; group < Layout::kSliceGroups; ++group) {
            const uint32_t x = to + group * Layout::kShareBytes + Layout::kWeightBytes;
            const int column = work.column(step, group);
            copy_box(x, xs, column, token, 0, 0, full);
            copy_box(x + Layout::kXBytes, xs, column + kBlockColumns, token, 0, 0, full);
        }
    };
    fetch_map(weights);
    fetch_map(xs);
    const int begun = min(steps, static_cast<int>(ring.count));
    for (int step = 0; step < begun; ++step) fetch_weight(step, step);
    wait_for_previous();
    for (int step = 0; step < begun; ++step) fetch_x(step, step);
    for (int step = begun; step < steps; ++step, ring.next()) {
        wait_bytes(ring.free() + ring.slot * 8, ring.phase);
        fetch_weight(ring.slot, step);
        fetch_x(ring.slot, step);
    }
}

// The sums of a group of warps: `sums[s]` of its slice s. Scales of blocks are asked for a stage early.
template <typename Layout>
__device__ inline void sum_thin(float (&sums)[Layout::kOwnSlices][Layout::kSums], int64_t in_features,
                                WideScales<kIsDealt<typename Layout::Params>>& scales, const ThinWork<Layout>& work,
                                int row_tile, int slice_group) {
    constexpr int kSteps = kBlockColumns / 16;
    const int lane = threadIdx.x % 32;
    const uint32_t share = work.ring.stages + slice_group * Layout::kShareBytes;
    const uint32_t weight_at = share + row_tile * kTileRows * kThinColumns + ThinStage::named(lane);
    const uint32_t x_at = share + Layout::kWeightBytes;
    const int last_column = static_cast<int>(in_features) - 1;
    WideRing ring = work.ring;
    uint4 held[2][kSteps];
    uint32_t used = ring.count;  // the stage whose last products are open; none yet
    int column = work.column(0, slice_group);
    float2 next = scales.fetch(min(column, last_column));
#pragma unroll
    for (int s = 0; s < Layout::kOwnSlices; ++s) {
#pragma unroll
        for (int i = 0; i < Layout::kSums; ++i) sums[s][i] = 0.0f;
    }
#pragma unroll 1
    for (int turn = 0; turn < work.turns; ++turn, column += kStrideColumns) {
#pragma unroll
        for (int s = 0; s < Layout::kOwnSlices; ++s) {
            const int half = s % 2;
            if (half == 0) {
                if (scales.change()) {
                    const int more = s + 2 < Layout::kOwnSlices ? (s + 2) * kBlockColumns : kStrideColumns;
                    scales.take(next);
                    next = scales.fetch(min(column + more, last_column));
                }
                wait_bytes(ring.full + ring.slot * 8, ring.phase);
            }
            const uint32_t stage = ring.slot * Layout::kStageBytes, from = weight_at + stage;
#pragma unroll
            for (int pair = 0; pair < kSteps / 2; ++pair)
                widen_tile(from ^ ThinStage::further(half * 2 + pair), scales.factors, held[half][2 * pair],
                           held[half][2 * pair + 1]);
            pin_registers(held[half]);
            wait_products<0>();  // those of the other half
            pin_registers(held[1 - half]);
            if (half == 0) {
                if (used < ring.count && lane == 0) arrive_at(ring.free() + used * 8);
                used = ring.slot;
            }
            const uint64_t x = lines_at(x_at + stage + half * Layout::kXBytes);
            begin_products();
#pragma unroll
            for (int k = 0; k < kSteps; ++k) multiply_held_lines(sums[s], held[half][k], x + k * kNextColumns);
            close_products();
            if (half == 1) ring.next();
        }
    }
    wait_products<0>();
}

// The consumer warps.
template <typename T, typename Layout>
__device__ inline void consume_thin(const Fp8LinearParams& p, const ThinWork<Layout>& work, char* memory) {
    const int group = same_in_warp(threadIdx.x / kWarpgroupThreads), slice_group = group / Layout::kRowGroups;
    const int row_tile = group % Layout::kRowGroups * 4 + threadIdx.x / 32 % 4;
    WideScales<kIsDealt<typename Layout::Params>> scales(p, work.first_column, row_tile);  // no kernel writes them
    wait_for_previous();
    const int columns = p.gated ? Layout::kRows / 2 : Layout::kRows;
    const int live = static_cast<int>(min(p.rows - work.first_token, static_cast<int64_t>(Layout::kTokens)));
    const auto token = [&](int i) { return p.gated ? i / (Layout::kRows / 2) : i / Layout::kRows; };
    const auto column = [&](int i) { return i & (columns - 1); };
    const auto exists = [&](int i) { return i < live * columns && work.first_column + column(i) < p.out_features; };
    const auto residual = [&](int i) {
        return exists(i) ? residual_of<T>(p, work.first_token + token(i), work.first_column + column(i)) : T{};
    };
    const int first = work.rank * Layout::kConsumers + static_cast<int>(threadIdx.x);
    const T first_residual = residual(first);  // asked for before there are any sums

    float sums[Layout::kOwnSlices][Layout::kSums];
    sum_thin<Layout>(sums, p.in_features, scales, work, row_tile, slice_group);
    meet_at<1, Layout::kConsumers>();  // the stages are free
    const int lane = threadIdx.x % 32, row = row_tile * kTileRows + lane / 4;
    float* mine = reinterpret_cast<float*>(memory + slice_group * Layout::kOwnSlices * Layout::kSliceBytes);
#pragma unroll
    for (int s = 0; s < Layout::kOwnSlices; ++s) {
#pragma unroll
        for (int i = 0; i < Layout::kSums; ++i) {
            const int at = i / 4 * kTileTokens + lane % 4 * 2 + i % 2;
            mine[s * (Layout::kSliceBytes / 4) + at * Layout::kSumStride + row + i / 2 % 2 * 8] = sums[s][i];
        }
    }
    if constexpr (Layout::kCluster > 1) {
        cluster_barrier();
    } else {
        meet_at<1, Layout::kConsumers>();
    }
    const auto add_slices = [&](int of_token, int of_row) {
        constexpr int kEach = kSlices / Layout::kCluster;
        const int at = (of_token * Layout::kSumStride + of_row) * 4;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
            const int from = at + s % kEach * Layout::kSliceBytes;
            if constexpr (Layout::kCluster > 1) {
                sum += load_cluster(shared_address(memory) + from, s / kEach);
            } else {
                sum += *reinterpret_cast<const float*>(memory + from);
            }
        }
        return sum;
    };
    for (int i = first; i < live * columns; i += Layout::kCluster * Layout::kConsumers) {
        if (!exists(i)) continue;
        const int of_row = p.gated ? column(i) / 8 * kTileRows + column(i) % 8 : column(i);
        const float up = p.gated ? add_slices(token(i), of_row + kTileRows / 2) : 0.0f;
        const float sum = add_slices(token(i), of_row);
        const T added = i == first ? first_residual : residual(i);
        write_output<T>(p, work.first_token + token(i), work.first_column + column(i), sum, up, added);
    }
    if constexpr (Layout::kCluster > 1) cluster_barrier();  // another CTA may still be reading here
}

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kCtasPerSm)
    linear_thin(const __grid_constant__ typename Layout::Params p, const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap xs, uint32_t token_blocks, uint32_t stages, int ring_bytes) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t tile = blockIdx.x / Layout::kCluster, base = shared_address(memory);
    const int64_t columns = p.gated ? Layout::kRows / 2 : Layout::kRows;
    const ThinWork<Layout> work = {static_cast<int>(blockIdx.x % Layout::kCluster),
                                   blocks_before(p.in_features, 0),
                                   int64_t{tile / token_blocks} * columns,
                                   int64_t{tile % token_blocks} * Layout::kTokens,
                                   {base, base + ring_bytes, stages}};
    if (threadIdx.x == Layout::kConsumers) {
        for (uint32_t i = 0; i < stages; ++i) {
            start_barrier(work.ring.full + i * 8);
            start_barrier(work.ring.free() + i * 8, Layout::kConsumers / 32);
        }
        show_barriers();
    }
    __syncthreads();
    let_next_start();
    if (threadIdx.x < Layout::kConsumers) {
        if constexpr (Layout::kGivesAway) take_registers<kLinearConsumerRegisters>();
        consume_thin<T, Layout>(p, work, memory);
    } else {
        if constexpr (Layout::kGivesAway) give_registers<kLinearProducerRegisters>();
        if (threadIdx.x == Layout::kConsumers) produce_thin<Layout>(p, weights, xs, work);
        wait_for_previous();
        if constexpr (Layout::kCluster > 1) {
            __syncwarp();
            cluster_barrier();
            cluster_barrier();
        }
    }
}

// `ring_limit`: bytes of shared memory for stages.
template <typename T, typename Layout>
void launch_thin(const typename Layout::Params& p, int ring_limit, cudaStream_t stream) {
    static_assert(2 * Layout::kStageBytes <= (Layout::kCtasPerSm > 1 ? kThinBytes : kWideBytes));
    if (ring_limit < 2 * Layout::kStageBytes)
        throw std::logic_error("fp8_linear: a stage is free when the next is read");
    using Size = cuuint64_t;
    const Size width = static_cast<Size>(p.in_features), out = static_cast<Size>(p.out_features);
    const Size plain[] = {width, out, 1, 1}, gated[] = {width, 8, 2, out / 8};
    const Size plain_steps[] = {width, width, width}, gated_steps[] = {width, out * width, 8 * width};
    const cuuint32_t plain_box[] = {kThinColumns, Layout::kRows, 1, 1};
    const cuuint32_t gated_box[] = {kThinColumns, 8, 2, Layout::kRows / 16};
    const CUtensorMap weights =
        map_boxes("fp8_linear", CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, p.weight, 4,
                  p.gated ? gated : plain, p.gated ? gated_steps : plain_steps, p.gated ? gated_box : plain_box);
    const CUtensorMap xs = map_x<T, Layout>(p);
    const int64_t columns = p.gated ? Layout::kRows / 2 : Layout::kRows;
    const int64_t row_blocks = (p.out_features + columns - 1) / columns;
    const int64_t token_blocks = (p.rows + Layout::kTokens - 1) / Layout::kTokens;
    const int stages = std::min(ring_limit / Layout::kStageBytes, blocks_before(p.in_features, 0) * Layout::kTurn);
    const int ring_bytes = std::max(stages * Layout::kStageBytes, Layout::kSumBytes);
    const LaunchShape shape = {row_blocks * token_blocks * Layout::kCluster, Layout::kThreads, ring_bytes + 16 * stages,
                               Layout::kCluster, Effect::kNone};
    launch("fp8_linear", linear_thin<T, Layout>, shape, stream, p, weights, xs, static_cast<uint32_t>(token_blocks),
           static_cast<uint32_t>(stages), ring_bytes);
}

// Whether tile kIndex of kThinTiles is the one, and was launched.
template <typename T, typename Params, size_t kIndex>
bool launch_thin_if_chosen(const Params& p, const ThinTile& tile, cudaStream_t stream) {
    constexpr ThinTile kTile = kThinTiles[kIndex];
    if (!(tile == kTile)) return false;
    using Layout = ThinLayout<kTile.row_groups, kTile.slice_groups, kTile.cluster, kTile.tokens, Params>;
    launch_thin<T, Layout>(p, thin_ring_bytes(kTile), stream);
    return true;
}

template <typename T, typename Params, size_t... kIndices>
bool launch_chosen_thin(const Params& p, const ThinTile& tile, cudaStream_t stream, std::index_sequence<kIndices...>) {
    return (launch_thin_if_chosen<T, Params, kIndices>(p, tile, stream) || ...);
}

template <typename T, typename Params>
void launch_linear_thin(const Params& p, const ThinTile& tile, cudaStream_t stream) {
    if (!launch_chosen_thin<T>(p, tile, stream, std::make_index_sequence<std::size(kThinTiles)>()))
        throw std::logic_error("fp8_linear: a tile was chosen that is not built");
}

}  // namespace tide::cuda
