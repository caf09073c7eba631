// Paged attention for Hopper: the copy engine streams pages to the warps, tile by tile.
//
// The warps of a CTA take a chunk's tiles of 16 positions in turn, each with its own ring in shared memory and its own
// online softmax, and meet only at the end of the chunk. A ring runs on into the next piece. With few query heads two
// CTAs share a multiprocessor: while one finds its piece or adds up its warps, the other keeps memory busy.
//
//     find a piece -> request for tiles -> make queries and new heads -> accumulate tile by tile -> add up warps ->
//     store
//                     ^ and queries, before the present piece is added up
//
// Joined, the first two need nothing that kernels of the same pass write: where it is known that all before the pass
// has ended (stream_history.h) they are done while the kernel before this one ends.
#pragma once

#include "cuda/attention/store.cuh"
#include "cuda/attention/stream_ring.cuh"
#include "cuda/attention/work.cuh"

namespace tide::cuda {

template <typename T, typename Layout>
struct StreamShared {
    NewHeads<T, Layout::kDim> heads;
    float2 stats[Layout::kSumPlaces][Layout::kWarps][Layout::kSumRows];
    uint64_t arrived[Layout::kWarps][Layout::kMostStages];
    int finder[WarpFinder<Layout::kQueryHeads>::kSaved];
    Piece pieces[Layout::kWarps][2];  // of each warp, the present one and the next
    bool is_last;
};

// Ring, sums, queries, and what else the warps share.
template <typename T, typename Layout>
constexpr int64_t stream_bytes(int stages) {
    return Layout::kWarps * (int64_t{stages} * Layout::kTileBytes + Layout::kSumPlaces * Layout::kSumBytes) +
           2 * Layout::kQueryBytes + static_cast<int64_t>(sizeof(StreamShared<T, Layout>));
}

#if TIDE_HAS_BULK_COPY

// The results of the warps become one and are stored; the last piece of its query heads adds up their chunks. The loop
// is not unrolled: between two pieces it would have to be fetched from afar.
template <typename T, typename Layout>
__device__ inline void finish_piece(const AttentionWork& p, const Piece& piece, StreamState<T, Layout>& state,
                                    StreamShared<T, Layout>& shared, char* sums, int warp, int lane) {
#pragma unroll 1
    for (int m = 0; m < Layout::kQueryTiles; ++m) {
        if (m * 8 >= piece.num_query_heads) break;
        // All have stored what lay in this place before: of two, before they sync_barrier last.
        if (m > 0 && Layout::kSumPlaces == 1) __syncthreads();
        const int place = m % Layout::kSumPlaces;
        char* all = sums + place * Layout::kWarps * Layout::kSumBytes;
        state.store_partial_of(m, reinterpret_cast<float*>(all + warp * Layout::kSumBytes), shared.stats[place][warp],
                               lane);
        __syncthreads();
        store_query_heads<T, Layout::kDim, Layout::kThreads, Layout::kWarps, Layout::kSumRows>(
            p, piece, m * 8, shared.stats[place], [&](int from, int row, int dim) {
                return *reinterpret_cast<const float4*>(all + from * Layout::kSumBytes +
                                                        (row * Layout::kSumStride + dim) * 4);
            });
    }
    if (!p.counted || piece.num_chunks <= 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what the others stored comes before, for they have sync_barrier
        shared.is_last = count_piece(p, piece);
    }
    __syncthreads();
    if (shared.is_last) combine_piece<T, Layout::kDim, Layout::kThreads>(p, piece);
}

#endif

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kCtasPerSm)
    attention_stream(const __grid_constant__ StreamWork w) {
#if TIDE_HAS_BULK_COPY
    constexpr int kWarps = Layout::kWarps;
    using Finder = WarpFinder<Layout::kQueryHeads>;
    extern __shared__ __align__(1024) char memory[];
    const AttentionWork& p = w.attention;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* sums = memory + kWarps * w.stages * Layout::kTileBytes;
    char* queries = sums + kWarps * Layout::kSumPlaces * Layout::kSumBytes;
    auto& shared = *reinterpret_cast<StreamShared<T, Layout>*>(queries + 2 * Layout::kQueryBytes);
    Ring<Layout> ring(w, shared_address(memory) + warp * w.stages * Layout::kTileBytes,
                      shared_address(shared.arrived[warp]), lane);
    if (threadIdx.x == 0) {
        fetch_map(w.keys);
        fetch_map(w.values);
    }
    if (w.reads_early) {
        order_copies_after_stores();
    } else {
        wait_for_previous();
    }
    const IndexReader early = {w.reads_early};
    const NewTokens<Layout::kHoldsPiece> tokens(w, lane, early);
    const GuessedPage guess = GuessedPage::make(w, warp, lane, early, Layout{});
    const Finder finder(p, early);
    if (blockIdx.x >= finder.total()) return wait_for_previous();
    Piece(&pieces)[2] = shared.pieces[warp];
    Piece held = finder.find(p, blockIdx.x, early);
    StreamTiles tiles = stream_tiles_of<Layout>(p, held, guess, warp, lane, early), next = {};
    if (!w.joined) copy_queries<T, Layout>(p, held, queries);  // first: they are few, and all wait for them
    ring.request(tiles, next, lane);
    if (warp == 0) finder.save(shared.finder);
    if (!Layout::kHoldsPiece) {
        if (lane == 0) pieces[0] = held;
        __syncwarp();
    }
    Finder known = finder;
    for (int turn = 0;; ++turn) {
        const int index = blockIdx.x + (turn + 1) * gridDim.x;
        const bool more = index < known.total();
        if (more) {
            const IndexReader read = {early.early && turn == 0};
            const Piece found = known.find(p, index, read);
            next = stream_tiles_of<Layout>(p, found, {-1, 0}, warp, lane, read);
            if (lane == 0) pieces[(turn + 1) % 2] = found;
            ring.request(tiles, next, lane);
        }
        if (turn == 0) {
            wait_for_previous();
            let_next_start();  // not earlier: kernels of later layers would occupy the multiprocessors
        }
        const Piece& piece = Layout::kHoldsPiece ? held : pieces[turn % 2];
        char* my_queries = queries + turn % 2 * Layout::kQueryBytes;
        if (w.joined) {
            make_heads<T, Layout>(w, piece, NewPositions(w, piece), tokens, my_queries, shared.heads, warp);
        } else {
            wait_all_copies();
        }
        __syncthreads();  // queries and new heads are there, and all have stored the piece before
        if (more && !w.joined)
            copy_queries<T, Layout>(p, pieces[(turn + 1) % 2], queries + (turn + 1) % 2 * Layout::kQueryBytes);
        // Tiles in between are seen by all query heads, as they are.
        const int query_heads = piece.num_query_heads;
        const VisibleRange visible_range(p, piece);
        const int whole_from = visible_range.end(p, query_heads - 1) - p.visible;
        const int whole_upto = min(visible_range.first_end, patched_from(w, piece));

        StreamState<T, Layout> state(shared_address(my_queries), lane);
#pragma unroll 1
        for (int first = tiles.begin; first < tiles.end; first += Layout::kStridePositions) {
            const uint32_t tile = ring.wait();
            const bool special = first < whole_from || first + kTilePositions > whole_upto;
            if (special && first + kTilePositions > patched_from(w, piece)) {
                __syncwarp();
                const int row = __shfl_sync(~0u, tiles.row, tiles.template turn_of<Layout>(first));
                patch_tile<T, Layout>(w, piece, shared.heads, memory + (tile - shared_address(memory)), first, row,
                                      lane);
            }
            state.accumulate_used(query_heads, p, w.scale, tile, special, first, piece, lane);
            ring.release();
            ring.request(tiles, next, lane);
        }
        ring.request(tiles, next, lane);
        finish_piece<T, Layout>(p, piece, state, shared, sums, warp, lane);
        if (!more) return;
        __syncwarp();
        if (Layout::kHoldsPiece) held = pieces[(turn + 1) % 2];
        tiles = next;
        next = {};
        known = Finder(p, shared.finder);
    }
#else
    refuse_architecture();
#endif
}

template <typename T, typename Layout>
void launch_stream(StreamWork& work, bool& combined, const DeviceInfo& device, cudaStream_t stream) {
    static_assert(stream_bytes<T, Layout>(1) <= kStreamShared);
    AttentionWork& p = work.attention;
    const int64_t pieces = most_pieces(p, Layout::kQueryHeads);
    // As many CTAs as there may be work for, and all of the memory for their rings; but where each piece has a
    // multiprocessor and they take most of them, the kernels before and after need shared memory there too.
    const int64_t wanted = (pieces + device.num_sms - 1) / device.num_sms;
    const int64_t ctas = wanted < Layout::kCtasPerSm ? wanted : Layout::kCtasPerSm;
    const int64_t free_bytes =
        device.shared_bytes_per_sm / ctas - device.reserved_shared_bytes - stream_bytes<T, Layout>(0);
    const int64_t stages = free_bytes / (stream_bytes<T, Layout>(1) - stream_bytes<T, Layout>(0));
    const int most = pieces <= device.num_sms && 2 * pieces > device.num_sms ? 2 : Layout::kMostStages;
    work.stages = static_cast<int>(stages < 1 ? 1 : stages < most ? stages : most);
    work.by_chunk = Divider(p.num_kv_heads * query_head_blocks(p, Layout::kQueryHeads));
    const int64_t resident = ctas * device.num_sms, grid = pieces < resident ? pieces : resident;
    // To count a piece takes long: not where a CTA has many. More chunks are too much for the last CTA to add up:
    // another kernel does it.
    p.counted = pieces <= tuning::kMostCountedPieces * resident &&
                num_chunks(p.max_context) <= tuning::kMostCountedChunks && p.num_tokens * p.num_heads <= kCounters;
    combined = p.counted;
    launch("paged_attention", attention_stream<T, Layout>,
           {grid, Layout::kThreads, stream_bytes<T, Layout>(work.stages), 1, Effect::kNone}, stream, work);
    if (work.joined) StreamHistory::record_pool(stream, p.k_pool);
}

// Few query heads a piece are quickest for as long as every piece has a multiprocessor of its own; then tiles should be
// read once. Numbers are the same.
template <typename T, int kDim>
void launch_stream_of(StreamWork& work, bool& combined, cudaStream_t stream) {
    const DeviceInfo device = current_device("paged_attention");
    const AttentionWork& p = work.attention;
    const int64_t query_heads = p.max_queries * p.heads_per_kv;
    using Narrow = StreamLayout<kDim, 1>;
    using Middle = StreamLayout<kDim, 2>;
    if (query_heads <= Narrow::kQueryHeads || most_pieces(p, Narrow::kQueryHeads) <= device.num_sms)
        return launch_stream<T, Narrow>(work, combined, device, stream);
    if (query_heads <= Middle::kQueryHeads || most_pieces(p, Middle::kQueryHeads) <= device.num_sms)
        return launch_stream<T, Middle>(work, combined, device, stream);
    launch_stream<T, StreamLayout<kDim, 4>>(work, combined, device, stream);
}

template <typename T>
void launch_attention_stream(const PagedAttentionParams& p, const RotaryWriteParams* rotary, bool& combined,
                             cudaStream_t stream) {
    constexpr DType kType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    StreamWork work(p);
    if (rotary != nullptr) {
        work.joined = true;
        work.rotary = *rotary;
        work.aligned = in_twos<T>(*rotary);
        work.reads_early = StreamHistory::may_read(stream, p.k_pool);
    }
    work.keys = map_rows("paged_attention", kType, p.k_pool, pool_rows(p), p.head_dim, kTilePositions);
    work.values = map_rows("paged_attention", kType, p.v_pool, pool_rows(p), p.head_dim, kTilePositions);
    if (p.head_dim == 64) return launch_stream_of<T, 64>(work, combined, stream);
    launch_stream_of<T, 128>(work, combined, stream);
}

}  // namespace tide::cuda
