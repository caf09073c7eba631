// Paged attention with tensor cores: one CTA per multiprocessor walks the pieces.
//
// The warps of a CTA take a chunk's tiles of 16 positions in turn, each with its own ring of tiles in shared memory and
// its own online softmax, and meet only at the end of the chunk. The ring runs on into the next piece, whose pages and
// queries are requested for when the present one begins, so memory stays busy while the warps' results are added up.
//
// With few query heads, the CTA that finishes the last chunk of some query heads also adds up their chunks. It asks for
// that one piece later, when all its threads meet anyway. With many query heads that is too much for one CTA: another
// kernel does it.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/store.cuh"
#include "cuda/attention/tiles_state.cuh"

namespace tide::cuda {

template <typename Layout>
struct AttentionShared {
    PieceFinder<Layout::kThreads, Layout::kQueryHeads> finder;
    Piece pieces[Layout::kWarps][3];  // every warp's copy of the one before, the present and the next one
    float2 stats[Layout::kWarps][Layout::kSumRows * 8];
    bool is_last;  // the piece before was the last of its query heads to be stored
};

#if TIDE_HAS_TENSOR_CORE_PATH

// One warp's tiles of a piece: every kWarps-th, without those that lie before all windows.
struct WarpTiles {
    int begin, end;  // positions: where the first tile begins and the chunk ends
    int count;
    int pages[2];  // of the tile that has this thread's number: where each 8 positions lie in the pools
};

template <typename Layout>
__device__ inline WarpTiles tiles_of(const AttentionWork& p, const Piece& piece, int warp, int lane) {
    constexpr int kWarps = Layout::kWarps;
    const int begin = piece.begin(), end = piece.end();
    const int low = span_of(p, piece.position_of(p.by_heads_per_kv(piece.first_query_head))).low;
    const int skipped = max(low - begin, 0) / kTilePositions;
    const int first = warp + max(skipped - warp + kWarps - 1, 0) / kWarps * kWarps;
    const int num_tiles = (end - begin + kTilePositions - 1) / kTilePositions;
    WarpTiles tiles = {begin + first * kTilePositions, end, max(num_tiles - first + kWarps - 1, 0) / kWarps, {0, 0}};
    if (lane >= tiles.count) return tiles;
    const int32_t* table = p.block_tables + piece.row * p.max_blocks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Positions past the end share the page of the last ones: they are not read.
        const int position = tiles.begin + lane * Layout::kStridePositions + half * AttentionWork::kPageUnit;
        const int unit = min(position, end - 1) / AttentionWork::kPageUnit, entry = p.by_page_units(unit);
        tiles.pages[half] = (table[entry] * p.kv_heads + piece.kv_head - entry) * p.page_units + unit;
    }
    return tiles;
}

// Returns when all but the last `open` of this thread's copy groups have arrived; none open: all copies.
template <int kMost>
__device__ inline void wait_copies(int open) {
    if (kMost >= 3 && open >= 3) return wait_copy_groups<3>();
    if (kMost >= 2 && open == 2) return wait_copy_groups<2>();
    if (kMost >= 1 && open == 1) return wait_copy_groups<1>();
    wait_all_copies();
}

#endif

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1) attention_tiles(const __grid_constant__ AttentionWork p) {
#if TIDE_HAS_TENSOR_CORE_PATH
    constexpr int kStages = Layout::kStages, kQueryTiles = Layout::kQueryTiles;
    constexpr bool kCounts = Layout::kCounts;
    extern __shared__ __align__(16) char tiles[];
    __shared__ AttentionShared<Layout> shared;
    char* sums = tiles + Layout::kWarps * Layout::kWarpBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t ring = shared_address(tiles) + warp * Layout::kWarpBytes;
    const uint32_t queries = shared_address(sums + Layout::kWarps * Layout::kSumBytes);
    const ScoreScale scale(p);
    let_next_start();
    wait_for_previous();
    const uint64_t policy = read_once_policy();
    shared.finder.count(p);
    const int total = shared.finder.total();
    if (blockIdx.x >= total) return;
    Piece* pieces = shared.pieces[warp];

    int which = 0;                  // of the queries: those of the present piece; there is none in the first round
    int before = 0, present = 1;    // of the pieces; the next one has the third place
    bool waiting = false;           // the piece before is stored, but not counted
    WarpTiles now = {}, next = {};  // of the present and the next piece
    int requested = 0, requested_next = 0;  // tiles whose copy was started, of either
    int slot = 0, open = 0;                 // of the ring: the oldest tile, and how many are on their way
    for (int index = blockIdx.x;; index += gridDim.x) {
        const bool more = index < total, is_first = index == blockIdx.x;
        next.count = requested_next = 0;
        if (more) {
            const Piece piece = shared.finder.find(p, index);
            if (lane == 0) pieces[3 - before - present] = piece;
            copy_queries<Layout>(p, piece, queries + (which ^ 1) * Layout::kQueryBytes);
            next = tiles_of<Layout>(p, piece, warp, lane);
        }
        __syncwarp();
        const Piece& piece = pieces[present];
        const int num_query_heads = is_first ? 0 : piece.num_query_heads;
        int ends[2 * kQueryTiles], all_upto = 0, all_from = 0;
        if (!is_first) {
#pragma unroll
            for (int r = 0; r < 2 * kQueryTiles; ++r)
                ends[r] = piece.position_of(p.by_heads_per_kv(piece.first_query_head + r * 8 + g)) + 1;
            // Query heads come in the order of their positions.
            all_upto = min(piece.position_of(p.by_heads_per_kv(piece.first_query_head)) + 1, now.end);
            all_from =
                piece.position_of(p.by_heads_per_kv(piece.first_query_head + num_query_heads - 1)) + 1 - p.visible;
        }

        WarpState<T, Layout> state;
        for (int turn = 0;; ++turn) {
#pragma unroll 1
            while (open < kStages && (requested < now.count || requested_next < next.count)) {
                const bool is_next = requested == now.count;
                const int tile = is_next ? requested_next : requested;
                const int pages[2] = {__shfl_sync(~0u, is_next ? next.pages[0] : now.pages[0], tile),
                                      __shfl_sync(~0u, is_next ? next.pages[1] : now.pages[1], tile)};
                const int left = is_next ? next.end - next.begin : now.end - now.begin;
                const int free = slot + open < kStages ? slot + open : slot + open - kStages;
                copy_tile<Layout>(p, pages, left - tile * Layout::kStridePositions, ring + free * Layout::kStageBytes,
                                  lane, policy);
                ++(is_next ? requested_next : requested);
                close_copy_group();
                ++open;
            }
            if (turn >= now.count) break;
            wait_copies<kStages - 1>(open - 1);
            __syncwarp();  // the other lanes' copies have arrived too
            const int first = now.begin + turn * Layout::kStridePositions;
            const bool masked = first < all_from || first + kTilePositions > all_upto;
            state.accumulate(queries + which * Layout::kQueryBytes, ring + slot * Layout::kStageBytes, scale, masked,
                             first, ends, p.visible, g, t);
            __syncwarp();  // all lanes have read the tile before it is filled again
            slot = slot + 1 == kStages ? 0 : slot + 1;
            --open;
        }
        if (is_first) {
            wait_copies<kStages - 1>(open - 1);
            __syncthreads();  // all the queries of the next piece are there
        }
        if (kCounts && waiting) __threadfence();
#pragma unroll
        for (int row = 0; row < 2 * kQueryTiles; row += Layout::kSumRows) {
            if (row * 8 >= num_query_heads) break;
            __syncthreads();  // all have stored what was there before
            if (kCounts && waiting && row == 0 && threadIdx.x == 0) shared.is_last = count_piece(p, pieces[before]);
            state.store_partial(reinterpret_cast<float*>(sums + warp * Layout::kSumBytes), shared.stats[warp], row,
                                num_query_heads, g, t);
            if (row == 0) wait_copies<kStages - 1>(open - 1);  // the queries of the next piece
            __syncthreads();
            store_query_heads<T, Layout::kDim, Layout::kThreads, Layout::kWarps, Layout::kSumRows * 8>(
                p, piece, row * 8, shared.stats, [&](int w, int r, int dim) {
                    return *reinterpret_cast<const float4*>(sums + w * Layout::kSumBytes +
                                                            sum_index<Layout::kSumStride>(r, dim) * 4);
                });
        }
        if (kCounts) {
            bool combine = waiting && shared.is_last;
            int which_piece = before;
            waiting = !is_first && piece.num_chunks > 1 && p.counted;
#pragma unroll 1
            while (true) {
                if (combine) combine_piece<T, Layout::kDim, Layout::kThreads>(p, pieces[which_piece]);
                if (more || !waiting) break;
                __threadfence();  // this was the last piece: no later one counts it
                __syncthreads();
                if (threadIdx.x == 0) shared.is_last = count_piece(p, piece);
                __syncthreads();
                combine = shared.is_last;
                which_piece = present;
                waiting = false;
            }
        }
        if (!more) return;
        now = next;
        requested = requested_next;
        which ^= 1;
        const int free_place = before;
        before = present;
        present = 3 - free_place - present;
    }
#else
    refuse_architecture();
#endif
}

// False: it needs more shared memory than the device has.
template <typename T, typename Layout>
bool launch_attention(const PagedAttentionParams& p, bool& combined, const DeviceInfo& device, cudaStream_t stream) {
    const int64_t needed = Layout::kSharedBytes + static_cast<int64_t>(sizeof(AttentionShared<Layout>));
    if (needed > device.shared_bytes) return false;
    const int64_t heads_per_kv = p.num_heads / p.num_kv_heads;
    const int64_t query_head_blocks =
        (p.num_tokens * heads_per_kv + Layout::kQueryHeads - 1) / Layout::kQueryHeads + p.rows;
    const int64_t most_pieces = query_head_blocks * p.num_kv_heads * num_chunks(p.max_context);
    const int64_t ctas = most_pieces < device.num_sms ? most_pieces : device.num_sms;
    AttentionWork work(p);
    work.counted = Layout::kCounts && p.num_tokens * p.num_heads <= kCounters;
    combined = work.counted;
    launch("paged_attention", attention_tiles<T, Layout>,
           {ctas, Layout::kThreads, Layout::kSharedBytes, 1, Effect::kNone}, stream, work);
    return true;
}

template <typename T, int kDim>
bool launch_layout(const PagedAttentionParams& p, bool& combined, cudaStream_t stream) {
    const DeviceInfo device = current_device("paged_attention");
    const bool many_query_heads = p.max_queries * (p.num_heads / p.num_kv_heads) > 16;
    // Two query tiles of the widest heads would not fit the registers.
    constexpr int kMostTiles = kDim <= 128 ? 2 : 1;
    using Wide = AttentionLayout<kDim, kMostTiles, false>;
    if (many_query_heads && launch_attention<T, Wide>(p, combined, device, stream)) return true;
    if (launch_attention<T, AttentionLayout<kDim, 1, false>>(p, combined, device, stream)) return true;
    return launch_attention<T, AttentionLayout<kDim, 1, true>>(p, combined, device, stream);
}

template <typename T>
bool launch_attention_tiles(const PagedAttentionParams& p, bool& combined, cudaStream_t stream) {
    if (p.head_dim <= 64) return launch_layout<T, 64>(p, combined, stream);
    if (p.head_dim <= 96) return launch_layout<T, 96>(p, combined, stream);
    if (p.head_dim <= 128) return launch_layout<T, 128>(p, combined, stream);
    return launch_layout<T, 256>(p, combined, stream);
}

}  // namespace tide::cuda
