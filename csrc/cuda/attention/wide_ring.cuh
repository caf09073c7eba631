// What the wide attention shares, and the three producer warps for keys, values and queries.
//
//     shared:  a ring of tiles (keys, values), queries of two pieces, what a warpgroup hands over, WideShared
//
// They run before the consumers, on into the pieces that follow: two as far as the ring has free slots, the third
// by one piece. Some multiprocessors are further from memory than others, so pieces are not dealt out in advance: when
// all keys of a piece are on their way, their producer claims the next piece and posts its index for the other two.
#pragma once

#include "cuda/attention/wide_state.cuh"
#include "cuda/attention/work.cuh"

namespace tide::cuda {

template <typename Layout>
struct WideShared {
    float2 stats[Layout::kWarpgroups][Layout::kQueryHeads];
    uint64_t keys[Layout::kMostStages], values[Layout::kMostStages], free[Layout::kMostStages];  // of the ring
    uint64_t known[2], done[2];                                                                  // of the pieces
    uint64_t index_posted[2], index_read[2];                                                     // of their indices
    uint64_t sync_barrier;                                                                       // of the warpgroups
    Piece pieces[2];  // the present one and the next; the one after the last has no query heads
    int indices[2];
    bool is_last;
};

template <typename Layout>
constexpr int64_t wide_bytes(int stages) {
    return int64_t{stages} * Layout::kTileBytes + 2 * Layout::kQueryBytes + Layout::kExchangedBytes +
           static_cast<int64_t>(sizeof(WideShared<Layout>));
}

// Where things lie in the memory of a CTA.
template <typename Layout>
struct WidePlaces {
    char *tiles, *queries, *exchanged;
    WideShared<Layout>& shared;

    __device__ WidePlaces(char* memory, int stages)
        : tiles(memory),
          queries(memory + stages * Layout::kTileBytes),
          exchanged(queries + 2 * Layout::kQueryBytes),
          shared(*reinterpret_cast<WideShared<Layout>*>(exchanged + Layout::kExchangedBytes)) {}

    __device__ void start_barriers(int stages) const {
        for (int i = 0; i < stages; ++i) {
            start_barrier(shared_address(shared.keys + i));
            start_barrier(shared_address(shared.values + i));
            start_barrier(shared_address(shared.free + i), kWarpgroupThreads / 32);
        }
        for (int i = 0; i < 2; ++i) {
            start_barrier(shared_address(shared.known + i), 1 + 32);
            start_barrier(shared_address(shared.done + i), Layout::kThreads);
            start_barrier(shared_address(shared.index_posted + i));
            start_barrier(shared_address(shared.index_read + i), 2);
        }
        start_barrier(shared_address(&shared.sync_barrier), Layout::kThreads);
        show_barriers();
    }
};

// A place of the ring, and whether the ring was gone round an odd number of times.
struct WideSlot {
    int at = 0;
    uint32_t phase = 0;

    __device__ void next(int stages) {
        const bool again = ++at == stages;
        at = again ? 0 : at;
        phase ^= again;
    }
};

// The next piece that no CTA has claimed, for a CTA that had one. Each of these claims one that does not exist, and the
// last of them leaves the counter as it was.
__device__ inline int claim_piece(const AttentionWork& p, int total, int lane) {
    int taken = 0;
    if (lane == 0) {
        int32_t* counter = partials(p).counters + kCounters - 1;
        taken = atomicAdd(counter, 1);
        if (taken == total - 1) *counter = 0;
    }
    return __shfl_sync(~0u, taken, 0) + gridDim.x;
}

// Tells the number of the CTA's piece `turn`, the first of which all know.
template <typename Layout>
__device__ inline void post_piece_index(WideShared<Layout>& shared, int turn, int number, int lane) {
    const int at = (turn - 1) % 2;
    wait_bytes(shared_address(shared.index_read + at), ((turn - 1) / 2 & 1) ^ 1);
    if (lane != 0) return;
    shared.indices[at] = number;
    arrive_at(shared_address(shared.index_posted + at));
}

template <typename Layout>
__device__ inline int read_piece_index(WideShared<Layout>& shared, int turn, int lane) {
    if (turn == 0) return blockIdx.x;
    const int at = (turn - 1) % 2;
    wait_bytes(shared_address(shared.index_posted + at), (turn - 1) / 2 & 1);
    int number = 0;
    if (lane == 0) {
        number = shared.indices[at];
        arrive_at(shared_address(shared.index_read + at));
    }
    return __shfl_sync(~0u, number, 0);
}

// A warp that asks the copy engine for the keys or the values of all tiles of the CTA; `to`: of the first place.
// `claims`: it is the one that claims the pieces.
template <typename Layout>
__device__ inline void produce_tiles(const StreamWork& w, const WidePlaces<Layout>& places, const CUtensorMap& map,
                                     const char* to, const uint64_t* arrived, bool claims, int lane) {
    static_assert(kWideTiles * kWidePages == 32);  // a thread knows one page
    const AttentionWork& p = w.attention;
    if (w.reads_early) {
        order_copies_after_stores();
    } else {
        wait_for_previous();
    }
    const WarpFinder<Layout::kQueryHeads> finder(p, {w.reads_early});
    const uint64_t policy = read_once_policy();
    const uint32_t full = shared_address(arrived), free = shared_address(places.shared.free), base = shared_address(to);
    WideSlot slot;
    for (int turn = 0, number = blockIdx.x; number < finder.total(); ++turn) {
        const IndexReader read = {w.reads_early && turn == 0};
        const Piece piece = finder.find(p, number, read);
        const WideTiles tiles(p, piece);
        const bool exists = lane >= tiles.first && lane < tiles.upto;
        const int mine = exists ? pool_row(p, piece, {-1, 0}, tiles.begin + lane * kTilePositions, read) : 0;
        if (turn == 0 && w.reads_old_pages && tiles.end > piece.position_of(0)) wait_for_previous();
#pragma unroll 1
        for (int tile = 0; tile < kWideTiles; ++tile) {
            const int pages = tiles.pages(tile), skipped = tiles.skipped(tile);
            if (pages <= 0) continue;
            int rows[kWidePages];
#pragma unroll
            for (int page = 0; page < kWidePages; ++page)
                rows[page] = __shfl_sync(~0u, mine, tile + (skipped + page) * kWideTiles);
            wait_bytes(free + slot.at * 8, slot.phase ^ 1);
            if (lane == 0) {
                const uint32_t barrier = full + slot.at * 8, at = base + slot.at * Layout::kTileBytes;
                expect_bytes(barrier, pages * Layout::kPageBytes);
#pragma unroll
                for (int page = 0; page < kWidePages; ++page) {
                    if (page < pages)
                        copy_box(at + page * Layout::kPageBytes, map, 0, 0, 0, rows[page] / 8, barrier, policy);
                }
            }
            __syncwarp();
            slot.next(w.stages);
        }
        if (turn == 0) wait_for_previous();  // it may still take pieces, and write pages that come now
        if (claims) {
            number = claim_piece(p, finder.total(), lane);
            post_piece_index(places.shared, turn + 1, number, lane);
        } else {
            number = read_piece_index(places.shared, turn + 1, lane);
        }
    }
}

// Arrives when all copies of this thread have.
__device__ inline void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// The producer of the pieces and their queries.
template <typename T, typename Layout>
__device__ inline void produce_queries(const StreamWork& w, const WidePlaces<Layout>& places, int lane) {
    constexpr int kVectors = Layout::kDim / kVector;
    const AttentionWork& p = w.attention;
    if (!w.reads_early) wait_for_previous();
    const WarpFinder<Layout::kQueryHeads> finder(p, {w.reads_early});
    wait_for_previous();  // for queries
    for (int turn = 0;; ++turn) {
        const int at = turn % 2, number = read_piece_index(places.shared, turn, lane);
        const uint32_t known = shared_address(places.shared.known + at);
        const bool more = number < finder.total();
        const Piece piece = more ? finder.find(p, number) : Piece{};
        wait_bytes(shared_address(places.shared.done + at), (turn / 2 & 1) ^ 1);
        if (lane == 0) {
            places.shared.pieces[at] = piece;
            arrive_at(known);
        }
        for (int i = lane; i < piece.num_query_heads * kVectors; i += 32)
            copy_query_vector<T, Layout>(p, piece, places.queries + at * Layout::kQueryBytes, i);
        arrive_after_copies(known);
        if (!more) return;
    }
}

}  // namespace tide::cuda
