// The linear for many rows on sm_90a: products of four warps over weight and x in shared memory, which the copy engine
// fills, a block of 64 columns a stage, as one more warp asks it to.
//
// Each output is made of the same products in the same order as in linear_tiles.cuh, so that a row's bits do not depend
// on which of the two it went through: 16 columns at a time in order within a slice (linear_sums.cuh), then the slices
// in order. A slice is every eighth block. To read memory in long runs nonetheless, as many slices as there are
// registers for are summed side by side; what is left comes in further passes.
//
// Where there are few weight rows the CTAs of a cluster split the slices: each sends its sums to the next.
#pragma once

#include "cuda/linear/fp8_weight.cuh"
#include "cuda/linear/wide_ring.cuh"

namespace tide::cuda {

// The sums of all slices of this CTA, in order, on top of what `begin` puts into a piece of `total` when the first are
// there; `end` gets each piece. `add_block` adds the products of a block to the sums of its slice, which is at that
// place of those side by side.
template <typename Layout, typename AddBlock, typename Begin, typename End>
__device__ inline void sum_slices(float (&total)[Layout::kSums], int part, int blocks, AddBlock&& add_block,
                                  Begin&& begin, End&& end) {
    float sums[Layout::kAtOnce][Layout::kSums];
#pragma unroll 1
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
#pragma unroll
        for (int s = 0; s < Layout::kAtOnce; ++s) {
#pragma unroll
            for (int i = 0; i < Layout::kSums; ++i) sums[s][i] = 0.0f;
        }
        const int first = Layout::first_slice(part) + pass * Layout::kAtOnce;
        const int count = Layout::kEven ? Layout::kAtOnce : Layout::first_slice(part + 1) - first;
#pragma unroll 1
        for (int block = first; block < blocks; block += kSlices) {
#pragma unroll
            for (int s = 0; s < Layout::kAtOnce; ++s) {
                if (s < count && block + s < blocks) add_block(sums[s], block + s, s);
            }
        }
        wait_products<0>();
#pragma unroll
        for (int piece = 0; piece < Layout::kPieces; ++piece) {
            if (pass == 0) begin(total, piece);
#pragma unroll
            for (int s = 0; s < Layout::kAtOnce; ++s) {
#pragma unroll
                for (int i = piece * Layout::kPiece; i < (piece + 1) * Layout::kPiece; ++i) total[i] += sums[s][i];
            }
            end(total, piece);
        }
    }
}

// A stage of the ring has the weight of a block; `x_at` gives the address of its x by block and slot.
template <typename T, typename Layout, int kStageBytes, typename XAt, typename Begin, typename End>
__device__ inline void sum_blocks(float (&total)[Layout::kSums], WideRing& ring, int part, int blocks, XAt&& x_at,
                                  Begin&& begin, End&& end) {
    const uint32_t weight_at = ring.stages + threadIdx.x / kWarpgroupThreads * kWarpgroupRows * kLineBytes;
    const auto release = [&](uint32_t slot) {
        if (threadIdx.x % 32 == 0) arrive_at(ring.free() + slot * 8);
    };
    uint32_t used = ring.count;  // the stage whose products are open; none yet
    const auto add_block = [&](float (&to)[Layout::kSums], int block, int) {
        wait_bytes(ring.full + ring.slot * 8, ring.phase);
        const uint64_t a = lines_at(weight_at + ring.slot * kStageBytes);
        const uint64_t b = lines_at(x_at(block, ring.slot));
        begin_products();
#pragma unroll
        for (int k = 0; k < kBlockColumns / 16; ++k)
            multiply_lines(to, a + k * kNextColumns, b + k * kNextColumns, T{});
        close_products();
        wait_products<Layout::kOpen>();
        if constexpr (Layout::kOpen == 0) {
            release(ring.slot);
        } else {
            if (used < ring.count) release(used);
            used = ring.slot;
        }
        ring.next();
    };
    sum_slices<Layout>(total, part, blocks, add_block, begin, end);
}

// The rows of an E4M3 weight that a thread multiplies, those of its warp's row tile, and their scales.
template <bool kDealt>
struct WideScales {
    const float *upper, *lower;  // of rows g and g + 8, in the first column of blocks
    int shift;
    RowFactors<kDealt> factors;

    // `row_tile`: of 16 weight rows, from the one that begins at column `first_column` of y.
    __device__ WideScales(const Fp8LinearParams& p, int64_t first_column, int row_tile) : shift(p.scale_shift) {
        const auto scales_of = [&](int64_t column,
                                   int64_t more) {  // rows that do not exist have those of one that does
            const int64_t row = min(column, p.out_features - 1) + more;
            return p.scales + static_cast<uint32_t>(row) / p.block_rows * p.scale_stride;
        };
        const int64_t column = first_column + row_tile * (p.gated ? 8 : kTileRows) + threadIdx.x % 32 / 4;
        upper = scales_of(column, 0);
        lower = p.gated ? scales_of(column, p.out_features) : scales_of(column + 8, 0);
        take(fetch(0));
    }
    // The scales of the block that `column` is in.
    __device__ float2 fetch(int column) const {
        const int block = column >> shift;
        return {load_weight_float(upper + block), load_weight_float(lower + block)};
    }
    __device__ void take(const float2& scales) {
        factors = {Fp8Factor<kDealt>::of(scales.x), Fp8Factor<kDealt>::of(scales.y)};
    }
    __device__ bool change() const { return shift < kWholeRows; }
};

// Those of this warp's row tile, which no kernel writes; nothing for other weights.
template <typename Layout>
__device__ inline auto first_scales(const typename Layout::Params& p, int64_t first_column) {
    if constexpr (Layout::kFp8) {
        return WideScales<kIsDealt<typename Layout::Params>>(p, first_column, threadIdx.x / 32);
    } else {
        return nullptr;
    }
}

// sum_blocks() of a weight in E4M3: the other operand of the products is in registers, widened from the stage. Where
// there are registers for two blocks, one is widened while the products of the other go on.
template <typename Layout, typename XAt, typename Begin, typename End>
__device__ inline void sum_fp8_blocks(float (&total)[Layout::kSums],
                                      WideScales<kIsDealt<typename Layout::Params>>& scales,
                                      const WideWork<Layout>& work, XAt&& x_at, Begin&& begin, End&& end) {
    using Stage = Fp8Stage<kBlockColumns>;
    constexpr int kHeld = Layout::kOpen + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t weight_at = work.ring.stages + warp * Stage::kTileBytes;
    WideRing ring = work.ring;
    uint4 held[kHeld][kBlockColumns / 16];
    uint32_t used = ring.count;  // the stage whose products are open; none yet
    const auto release = [&](uint32_t slot) {
        if (lane == 0) arrive_at(ring.free() + slot * 8);
    };
    const auto add_block = [&](float (&to)[Layout::kSums], int block, int place) {
        uint4(&mine)[kBlockColumns / 16] = held[place % kHeld];
        if (scales.change()) scales.take(scales.fetch(block * kBlockColumns));  // before the weights are awaited
        wait_bytes(ring.full + ring.slot * 8, ring.phase);
        const uint32_t from = weight_at + ring.slot * Layout::kStageBytes;
        const uint64_t b = lines_at(x_at(block, ring.slot));
#pragma unroll
        for (int pair = 0; pair < Stage::kPairs; ++pair)
            widen_tile(from + Stage::named(lane, pair), scales.factors, mine[2 * pair], mine[2 * pair + 1]);
        pin_registers(mine);
        if constexpr (Layout::kOpen > 0) {
            wait_products<0>();
            pin_registers(held[(place + 1) % kHeld]);
            if (used < ring.count) release(used);
            used = ring.slot;
        }
        begin_products();
#pragma unroll
        for (int k = 0; k < kBlockColumns / 16; ++k) multiply_held_lines(to, mine[k], b + k * kNextColumns);
        close_products();
        if constexpr (Layout::kOpen == 0) {
            wait_products<0>();
            pin_registers(mine);
            pin_registers(to);
            release(ring.slot);
        }
        ring.next();
    };
    sum_slices<Layout>(total, work.part, work.blocks, add_block, begin, end);
}

template <typename Layout>
__device__ inline void consumer_barrier() {
    meet_at<1, Layout::kConsumers>();
}

// From the sums to y, through shared memory so that neighbours are written together.
template <typename T, typename Layout>
__device__ inline void write_sums(const LinearParams& p, int64_t first_column, int64_t first_token,
                                  const float (&total)[Layout::kSums], float* ordered) {
    consumer_barrier<Layout>();  // the memory is free again
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * kTileRows + lane / 4;
#pragma unroll
    for (int i = 0; i < Layout::kSums; ++i) {
        const int token = i / 4 * kTileTokens + lane % 4 * 2 + i % 2;
        ordered[token * Layout::kSumStride + first_row + i / 2 % 2 * 8] = total[i];
    }
    consumer_barrier<Layout>();
    // Each thread keeps to a column.
    constexpr int kBatch = 8;
    const int columns = p.gated ? Layout::kRows / 2 : Layout::kRows, step = Layout::kConsumers / columns;
    const int live = static_cast<int>(min(p.rows - first_token, static_cast<int64_t>(Layout::kTokens)));
    const int local = p.gated ? threadIdx.x % (Layout::kRows / 2) : threadIdx.x % Layout::kRows;
    const int64_t column = first_column + local;
    if (column >= p.out_features) return;
    const float* from = ordered + (p.gated ? local / 8 * kTileRows + local % 8 : local);
    int first = p.gated ? threadIdx.x / (Layout::kRows / 2) : threadIdx.x / Layout::kRows;
    for (; first < live; first += kBatch * step) {
        const auto token = [&](int i) { return min(first + i * step, live - 1); };
        float sums[kBatch], ups[kBatch];
        T residuals[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) residuals[i] = residual_of<T>(p, first_token + token(i), column);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sums[i] = from[token(i) * Layout::kSumStride];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) ups[i] = p.gated ? from[token(i) * Layout::kSumStride + kTileRows / 2] : 0.0f;
        write_outputs<T>(p, column, (live - first + step - 1) / step, sums, ups, residuals,
                         [&](int i) { return first_token + token(i); });
    }
}

// The consumer warps. Of CTAs that split the slices each hands its sums on: two meet, all their threads, when the first
// has done so; of more each waits for the pieces of the one before it. A CTA stays until no other will write or arrive
// here. The first could release without waiting, but racecheck hangs on a thread that arrives and leaves.
template <typename T, typename Layout>
__device__ inline void consume(const typename Layout::Params& p, const WideWork<Layout>& work, char* memory,
                               int partial_offset) {
    auto scales = first_scales<Layout>(p, work.first_column);
    wait_for_previous();
    const bool sends = work.part < Layout::kSplit - 1, receives = Layout::kSplit > 1 && work.part > 0;
    const int lane = threadIdx.x % 32;
    const auto partial_at = [&](int i) {  // four sums
        return partial_offset + (i / 4 * Layout::kConsumers + static_cast<int>(threadIdx.x)) * 16;
    };
    const auto x_at = [&](int, uint32_t slot) {
        return work.ring.stages + slot * Layout::kStageBytes + Layout::kXOffset;
    };
    WideRing ring = work.ring;
    const uint32_t piece_barriers = ring.full + ring.count * 16;
    float total[Layout::kSums];
    const auto begin = [&](float (&sums)[Layout::kSums], int piece) {
        if constexpr (Layout::kSplit > 2) {
            if (receives) wait_cluster(piece_barriers + piece * 8, 0);
        } else {
            if (receives) cluster_barrier();
        }
#pragma unroll
        for (int i = piece * Layout::kPiece; i < (piece + 1) * Layout::kPiece; i += 4) {
            const float4 four =
                receives ? *reinterpret_cast<const float4*>(memory + partial_at(i)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
            sums[i] = four.x;
            sums[i + 1] = four.y;
            sums[i + 2] = four.z;
            sums[i + 3] = four.w;
        }
    };
    const auto end = [&](const float (&sums)[Layout::kSums], int piece) {
        if constexpr (Layout::kSplit > 1) {
            if (!sends) return;
#pragma unroll
            for (int i = piece * Layout::kPiece; i < (piece + 1) * Layout::kPiece; i += 4)
                store_cluster(shared_address(memory) + partial_at(i), work.part + 1,
                              {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
        }
        if constexpr (Layout::kSplit > 2) {
            __syncwarp();
            if (lane == 0) publish_cluster(piece_barriers + piece * 8, work.part + 1);
        }
    };
    if constexpr (Layout::kFp8) {
        sum_fp8_blocks<Layout>(total, scales, work, x_at, begin, end);
    } else {
        sum_blocks<T, Layout, Layout::kStageBytes>(total, ring, work.part, work.blocks, x_at, begin, end);
    }
    if (Layout::kSplit == 2 ? sends : Layout::kSplit > 2) cluster_barrier();
    if (sends) return;
    write_sums<T, Layout>(p, work.first_column, work.first_token, total, reinterpret_cast<float*>(memory));
}

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1)
    linear_wide(const __grid_constant__ typename Layout::Params p, const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap xs, uint32_t token_blocks, uint32_t stages, int ring_bytes) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t tile = blockIdx.x / Layout::kSplit, base = shared_address(memory);
    const int64_t columns = p.gated ? Layout::kRows / 2 : Layout::kRows;
    const WideWork<Layout> work = {static_cast<int>(blockIdx.x % Layout::kSplit),
                                   count_blocks(p.in_features),
                                   int64_t{tile / token_blocks} * columns,
                                   int64_t{tile % token_blocks} * Layout::kTokens,
                                   {base, base + ring_bytes + Layout::kPartialBytes, stages}};
    if (threadIdx.x == Layout::kConsumers) {
        for (uint32_t i = 0; i < stages; ++i) {
            start_barrier(work.ring.full + i * 8);
            start_barrier(work.ring.free() + i * 8, Layout::kConsumers / 32);
        }
        for (int i = 0; i < Layout::kPieceBarriers; ++i)
            start_barrier(work.ring.full + stages * 16 + i * 8, Layout::kConsumers / 32);
        show_barriers();
    }
    __syncthreads();
    if constexpr (Layout::kSplit > 1) cluster_barrier();  // all are here to be written to
    let_next_start();
    if (threadIdx.x < Layout::kConsumers) {
        if constexpr (Layout::kGivesAway) take_registers<Layout::kConsumerRegisters>();
        consume<T, Layout>(p, work, memory, ring_bytes);
    } else {
        if constexpr (Layout::kGivesAway) give_registers<Layout::kProducerRegisters>();
        if (threadIdx.x == Layout::kConsumers) produce_blocks<Layout>(p, weights, xs, work);
        wait_for_previous();
        if constexpr (Layout::kSplit > 1) cluster_barrier();
    }
}

// Rows as they are; or 8 columns of y, the two halves of the weight, and as many times that as there are columns.
template <typename T, typename Layout>
CUtensorMap map_weights(const LinearParams& p) {
    constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    using Size = cuuint64_t;
    const Size width = static_cast<Size>(p.in_features), row = width * (Layout::kFp8 ? 1 : 2),
               out = static_cast<Size>(p.out_features);
    const Size plain[] = {width, out, 1, 1}, gated[] = {width, 8, 2, out / 8};
    const Size plain_steps[] = {row, row, row}, gated_steps[] = {row, out * row, 8 * row};
    const cuuint32_t plain_box[] = {kBlockColumns, Layout::kRows, 1, 1};
    const cuuint32_t gated_box[] = {kBlockColumns, 8, 2, Layout::kRows / 16};
    const auto sizes = p.gated ? gated : plain, steps = p.gated ? gated_steps : plain_steps;
    const auto box = p.gated ? gated_box : plain_box;
    if (!Layout::kFp8) return map_boxes("linear", kDType, p.weight, 4, sizes, steps, box, Layout::kRun);
    return map_boxes("fp8_linear", CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B, p.weight, 4, sizes, steps,
                     box);
}

template <typename T, typename Layout>
CUtensorMap map_x(const LinearParams& p) {
    constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    using Size = cuuint64_t;
    const Size row = static_cast<Size>(p.x_stride) * 2;
    const Size sizes[] = {static_cast<Size>(p.in_features), static_cast<Size>(p.rows), 1, 1}, steps[] = {row, row, row};
    const cuuint32_t box[] = {kBlockColumns, Layout::kTokens, 1, 1};
    return map_boxes("linear", kDType, p.x, 4, sizes, steps, box);
}

template <typename T, typename Layout>
void launch_wide(const typename Layout::Params& p, cudaStream_t stream) {
    const CUtensorMap weights = map_weights<T, Layout>(p), xs = map_x<T, Layout>(p);
    const int64_t columns = p.gated ? Layout::kRows / 2 : Layout::kRows;
    const int64_t row_blocks = (p.out_features + columns - 1) / columns;
    const int64_t token_blocks = (p.rows + Layout::kTokens - 1) / Layout::kTokens;
    const int stages = std::min((kWideBytes - Layout::kPartialBytes) / Layout::kStageBytes,
                                blocks_before(p.in_features, 0) * Layout::kOwnSlices);
    const int ring_bytes = std::max(stages * Layout::kStageBytes, Layout::kSumBytes);
    const int barrier_bytes = 16 * stages + 8 * Layout::kPieceBarriers;
    const LaunchShape shape = {row_blocks * token_blocks * Layout::kSplit, Layout::kThreads,
                               ring_bytes + Layout::kPartialBytes + barrier_bytes, Layout::kSplit, Effect::kNone};
    launch(Layout::kFp8 ? "fp8_linear" : "linear", linear_wide<T, Layout>, shape, stream, p, weights, xs,
           static_cast<uint32_t>(token_blocks), static_cast<uint32_t>(stages), ring_bytes);
}

}  // namespace tide::cuda
