// Paged attention for Hopper: the copy engine streams pages to the warps, tile by tile.
//
// The warps of a CTA take a chunk's tiles of 16 positions in turn, each with its own ring in shared memory and its own
// online softmax, and meet only at the end of the chunk. A ring runs on into the next piece. With few lanes two CTAs
// share a multiprocessor: while one finds its piece or adds up its warps, the other keeps memory busy.
//
//     find a piece -> ask for tiles -> make queries and new heads -> see tile by tile -> add up warps -> store
//                     ^ before the present piece is added up
#pragma once

#include "cuda/attention_finder.cuh"
#include "cuda/attention_joined.cuh"
#include "cuda/attention_store.cuh"
#include "cuda/attention_stream.h"

namespace tide::cuda {

template <typename T, typename Layout>
struct StreamShared {
    NewHeads<T, Layout::kDim> heads;
    float2 stats[Layout::kWarps][Layout::kSumRows];
    uint64_t arrived[Layout::kWarps][Layout::kMostStages];
    bool is_last;
};

// Ring, sums, queries, and what else the warps share.
template <typename T, typename Layout>
constexpr int64_t stream_bytes(int stages) {
    return Layout::kWarps * (int64_t{stages} * Layout::kTileBytes + Layout::kSumBytes) + Layout::kQueryBytes +
           static_cast<int64_t>(sizeof(StreamShared<T, Layout>));
}

#if TIDE_HAS_BULK_COPY

// One warp's tiles of a piece: every kWarps-th, without those that lie before all windows.
struct StreamTiles {
    int begin, count;  // position of the first tile; tiles
    int asked;         // tiles whose copy was started
    int row;           // of the tile that has this thread's number: where it lies in the pools, in rows of a head
};

// A page that is read before it is known whether it is needed: the right one where there is one row without a window,
// and then a read earlier than all others.
struct GuessedPage {
    int entry, block;

    template <typename Layout>
    __device__ static GuessedPage make(const AttentionWork& p, int warp, int lane, Layout) {
        const int tile = warp + lane * Layout::kWarps;
        const int position = chunk_begin(p.by_kv_heads(blockIdx.x)) + tile * kTilePositions;
        const int entry = p.by_page_units(position / AttentionWork::kPageUnit);
        if (p.rows > 1 || tile * kTilePositions >= kLargestChunk || entry >= p.max_blocks) return {-1, 0};
        return {entry, p.block_tables[entry]};
    }
};

template <typename Layout>
__device__ inline StreamTiles stream_tiles_of(const AttentionWork& p, const Piece& piece, const GuessedPage& guess,
                                              int warp, int lane) {
    constexpr int kWarps = Layout::kWarps;
    const int begin = piece.begin(), end = piece.end();
    const int low = span_of(p, piece.position_of(p.by_group(piece.first_lane))).low;
    const int skipped = max(low - begin, 0) / kTilePositions;
    const int first = warp + max(skipped - warp + kWarps - 1, 0) / kWarps * kWarps;
    const int num_tiles = (end - begin + kTilePositions - 1) / kTilePositions;
    StreamTiles tiles = {begin + first * kTilePositions, max(num_tiles - first + kWarps - 1, 0) / kWarps, 0, 0};
    if (lane >= tiles.count) return tiles;
    const int unit = (tiles.begin + lane * Layout::kTurnPositions) / AttentionWork::kPageUnit;
    const int entry = p.by_page_units(unit);
    const int block = entry == guess.entry ? guess.block : p.block_tables[piece.row * p.max_blocks + entry];
    tiles.row = ((block * p.kv_heads + piece.kv_head - entry) * p.page_units + unit) * AttentionWork::kPageUnit;
    return tiles;
}

// The places of a warp's ring, in the order they are filled and emptied.
struct RingPlace {
    int slot = 0;
    uint32_t phase = 0;

    __device__ void advance(int stages) {
        if (++slot < stages) return;
        slot = 0;
        phase ^= 1;
    }
};

#endif

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kCtasPerSm)
    attention_stream(const __grid_constant__ StreamWork w) {
#if TIDE_HAS_BULK_COPY
    constexpr int kWarps = Layout::kWarps, kLaneTiles = Layout::kLaneTiles;
    extern __shared__ __align__(1024) char memory[];
    const AttentionWork& p = w.attention;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stages = w.stages;
    char* ring = memory + warp * stages * Layout::kTileBytes;
    char* sums = memory + kWarps * stages * Layout::kTileBytes;
    char* queries = sums + kWarps * Layout::kSumBytes;
    auto& shared = *reinterpret_cast<StreamShared<T, Layout>*>(queries + Layout::kQueryBytes);
    float* my_sums = reinterpret_cast<float*>(sums + warp * Layout::kSumBytes);
    const uint32_t arrived = shared_address(shared.arrived[warp]);
    if (lane < stages) start_barrier(arrived + lane * 8);
    show_barriers();
    if (threadIdx.x == 0) {
        fetch_map(w.keys);
        fetch_map(w.values);
    }
    const ScoreScale scale(p);
    const uint64_t policy = read_once_policy();
    __syncwarp();
    let_next_start();
    wait_for_previous();
    const GuessedPage guess = GuessedPage::make(p, warp, lane, Layout{});
    const WarpFinder<Layout::kLanes> finder(p);
    const int total = finder.total();
    if (blockIdx.x >= total) return;

    RingPlace filled, emptied;
    int open = 0;  // tiles on their way
    const auto ask = [&](StreamTiles& tiles) {
#pragma unroll 1
        while (open < stages && tiles.asked < tiles.count) {
            const int row = __shfl_sync(~0u, tiles.row, tiles.asked);
            if (lane == 0) {
                const uint32_t to = shared_address(ring) + filled.slot * Layout::kTileBytes;
                const uint32_t barrier = arrived + filled.slot * 8;
                expect_bytes(barrier, Layout::kTileBytes);
#pragma unroll
                for (int line = 0; line < Layout::kLines; ++line)
                    copy_box(to + line * Layout::kBoxBytes, w.keys, line * kLineElements, row, barrier, policy);
#pragma unroll
                for (int line = 0; line < Layout::kLines; ++line)
                    copy_box(to + Layout::kPoolBytes + line * Layout::kBoxBytes, w.values, line * kLineElements, row,
                             barrier, policy);
            }
            filled.advance(stages);
            ++tiles.asked;
            ++open;
        }
    };

    Piece piece = finder.find(p, blockIdx.x);
    StreamTiles tiles = stream_tiles_of<Layout>(p, piece, guess, warp, lane);
    ask(tiles);
    for (int index = blockIdx.x;;) {
        const NewPositions fresh(w, piece);
        if (w.joined) {
            make_heads<T, Layout>(w, piece, fresh, queries, shared.heads, warp);
        } else {
            copy_queries<T, Layout>(p, piece, queries);
        }
        index += gridDim.x;
        const bool more = index < total;
        Piece next_piece = {};
        StreamTiles next = {};
        if (more) {
            next_piece = finder.find(p, index);
            next = stream_tiles_of<Layout>(p, next_piece, {-1, 0}, warp, lane);
        }
        // Lanes come in the order of their positions.
        const int first_query = p.by_group(piece.first_lane);
        const Sight sight = {piece.first_lane - first_query * p.group, piece.position_of(first_query) + 1, p.seen};
        const int all_upto = min(sight.first_end, piece.end());
        const int all_from = sight.end(p, piece.num_lanes - 1) - p.seen;
        const int mended_from = min(fresh.count > 0 ? fresh.first : piece.end(), piece.end());
        __syncthreads();  // queries and new heads are there, and all have stored the piece before

        StreamState<T, Layout> state(shared_address(queries), lane);
#pragma unroll 1
        for (int turn = 0; turn < tiles.count; ++turn) {
            const int first = tiles.begin + turn * Layout::kTurnPositions;
            char* tile = ring + emptied.slot * Layout::kTileBytes;
            wait_bytes(arrived + emptied.slot * 8, emptied.phase);
            if (first + kTilePositions > mended_from) {
                __syncwarp();
                mend_tile<T, Layout>(w, piece, fresh, shared.heads, tile, first, __shfl_sync(~0u, tiles.row, turn),
                                     lane);
            }
            const bool masked = first < all_from || first + kTilePositions > all_upto;
            state.see(p, shared_address(tile), scale, masked, first, sight, lane);
            __syncwarp();  // all lanes have read the tile before it is filled again
            emptied.advance(stages);
            --open;
            ask(tiles);
            ask(next);
        }
        ask(next);
#pragma unroll
        for (int m = 0; m < kLaneTiles; m += Layout::kSumTiles) {
            if (m * 8 >= piece.num_lanes) break;
            if (m > 0) __syncthreads();  // all have stored what was there before
#pragma unroll
            for (int i = 0; i < Layout::kSumTiles; ++i)
                state.leave(m + i, my_sums + i * 8 * Layout::kSumStride, shared.stats[warp] + i * 8, lane);
            __syncthreads();
            store_lanes<T, Layout::kDim, Layout::kThreads, kWarps, Layout::kSumRows>(
                p, piece, m * 8, shared.stats, [&](int from, int row, int dim) {
                    return *reinterpret_cast<const float4*>(sums + from * Layout::kSumBytes +
                                                            (row * Layout::kSumStride + dim) * 4);
                });
        }
        if (p.counted && piece.num_chunks > 1) {
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();  // what the others stored comes before, for they have met
                shared.is_last = count_piece(p, piece);
            }
            __syncthreads();
            if (shared.is_last) combine_piece<T, Layout::kDim, Layout::kThreads>(p, piece);
        }
        if (!more) return;
        piece = next_piece;
        tiles = next;
    }
#endif
}

template <typename T, typename Layout>
void launch_stream(StreamWork& work, bool& combined, const DeviceInfo& device, cudaStream_t stream) {
    static_assert(stream_bytes<T, Layout>(1) <= kStreamShared);
    AttentionWork& p = work.attention;
    const int64_t more_groups = p.max_queries * p.group <= Layout::kLanes ? 0 : p.num_tokens * p.group / Layout::kLanes;
    const int64_t lane_groups = p.rows + more_groups;
    const int64_t chunks = num_chunks(p.max_context), most_pieces = lane_groups * p.num_kv_heads * chunks;
    // As many CTAs as there may be work for, and all of the memory for their rings.
    const int64_t wanted = (most_pieces + device.num_sms - 1) / device.num_sms;
    const int64_t ctas = wanted < Layout::kCtasPerSm ? wanted : Layout::kCtasPerSm;
    int of_sm = 0, reserved = 0;
    check("paged_attention", cudaDeviceGetAttribute(&of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.id));
    check("paged_attention", cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device.id));
    const int64_t room = of_sm / ctas - reserved - stream_bytes<T, Layout>(0);
    const int64_t stages = room / (stream_bytes<T, Layout>(1) - stream_bytes<T, Layout>(0));
    work.stages = static_cast<int>(stages < 1 ? 1 : stages < Layout::kMostStages ? stages : Layout::kMostStages);
    // More lanes or chunks are too much for the last CTA to add up: another kernel does it.
    constexpr int64_t kMostChunks = 64;
    p.counted = Layout::kLaneTiles == 1 && chunks <= kMostChunks && p.num_tokens * p.num_heads <= kCounters;
    combined = p.counted;
    const int64_t resident = ctas * device.num_sms;
    launch("paged_attention", attention_stream<T, Layout>,
           {most_pieces < resident ? most_pieces : resident, Layout::kThreads, stream_bytes<T, Layout>(work.stages)},
           stream, work);
}

template <typename T, int kDim>
void launch_stream_of(StreamWork& work, bool& combined, cudaStream_t stream) {
    const DeviceInfo device = current_device("paged_attention");
    const int64_t lanes = work.attention.max_queries * work.attention.group;
    if (lanes <= 8) return launch_stream<T, StreamLayout<kDim, 1>>(work, combined, device, stream);
    if (lanes <= 16) return launch_stream<T, StreamLayout<kDim, 2>>(work, combined, device, stream);
    launch_stream<T, StreamLayout<kDim, 4>>(work, combined, device, stream);
}

template <typename T>
void launch_attention_stream(const PagedAttentionParams& p, const RotaryWriteParams* rotary, bool& combined,
                             cudaStream_t stream) {
    constexpr DType kType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    StreamWork work = {AttentionWork(p), {}, rotary != nullptr, true, {}, {}, 0};
    if (rotary != nullptr) {
        work.rotary = *rotary;
        work.aligned = in_twos<T>(*rotary);
    }
    work.keys = map_rows("paged_attention", kType, p.k_pool, p.head_dim, kTilePositions);
    work.values = map_rows("paged_attention", kType, p.v_pool, p.head_dim, kTilePositions);
    if (p.head_dim == 64) return launch_stream_of<T, 64>(work, combined, stream);
    launch_stream_of<T, 128>(work, combined, stream);
}

}  // namespace tide::cuda
