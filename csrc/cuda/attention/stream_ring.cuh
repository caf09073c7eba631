// How the tiles of a piece come to the warps: rings in shared memory that the copy engine fills.
#pragma once

#include "cuda/attention/joined.cuh"

namespace tide::cuda {

#if TIDE_HAS_BULK_COPY

// One warp's tiles of a piece: every kWarps-th, without those that lie before all windows.
struct StreamTiles {
    int begin, end;        // position of the first tile, and of the one after the last
    int count, requested;  // tiles; those whose copy was started
    int row;               // of the tile that has this thread's number: where it lies in the pools, in rows of a head

    template <typename Layout>
    __device__ int turn_of(int first) const {
        return count - (end - first) / Layout::kStridePositions;
    }
};

// A page that is read before it is known whether it is needed: the right one where there is one row without a window,
// and then a read earlier than all others.
struct GuessedPage {
    int entry, block;

    template <typename Layout>
    __device__ static GuessedPage make(const StreamWork& w, int warp, int lane, const IndexReader& read, Layout) {
        const AttentionWork& p = w.attention;
        const int tile = warp + lane * Layout::kWarps;
        const int position = chunk_begin(w.by_chunk(blockIdx.x)) + tile * kTilePositions;
        const int entry = p.by_page_units(position / AttentionWork::kPageUnit);
        if (p.rows > 1 || tile * kTilePositions >= kLargestChunk || entry >= p.max_blocks) return {-1, 0};
        return {entry, read(p.block_tables + entry)};
    }
};

// Where a position of the piece, a multiple of 8, lies in the pools, in rows of a head.
__device__ inline int pool_row(const AttentionWork& p, const Piece& piece, const GuessedPage& guess, int position,
                               const IndexReader& read = {}) {
    const int unit = position / AttentionWork::kPageUnit, entry = p.by_page_units(unit);
    const int block = entry == guess.entry ? guess.block : read(p.block_tables + piece.row * p.max_blocks + entry);
    return ((block * p.kv_heads + piece.kv_head - entry) * p.page_units + unit) * AttentionWork::kPageUnit;
}

template <typename Layout>
__device__ inline StreamTiles stream_tiles_of(const AttentionWork& p, const Piece& piece, const GuessedPage& guess,
                                              int warp, int lane, const IndexReader& read = {}) {
    constexpr int kWarps = Layout::kWarps;
    const int begin = piece.begin(), end = piece.end();
    const int low = span_of(p, piece.position_of(p.by_heads_per_kv(piece.first_query_head))).low;
    const int skipped = max(low - begin, 0) / kTilePositions;
    const int first = warp + max(skipped - warp + kWarps - 1, 0) / kWarps * kWarps;
    const int num_tiles = (end - begin + kTilePositions - 1) / kTilePositions;
    const int count = max(num_tiles - first + kWarps - 1, 0) / kWarps, from = begin + first * kTilePositions;
    StreamTiles tiles = {from, from + count * Layout::kStridePositions, count, 0, 0};
    if (lane >= tiles.count) return tiles;
    tiles.row = pool_row(p, piece, guess, tiles.begin + lane * Layout::kStridePositions, read);
    return tiles;
}

// One warp's ring. Holds as little as it can: registers are for sums.
template <typename Layout>
class Ring {
  public:
    // Shared addresses: of the ring's tiles, and of the barriers where they arrive.
    __device__ Ring(const StreamWork& w, uint32_t tiles, uint32_t arrived, int lane)
        : w_(w), tiles_(tiles), arrived_(arrived) {
        if (lane < w.stages) start_barrier(arrived_ + lane * 8);
        show_barriers();
        __syncwarp();
    }

    // Requests as many tiles as the ring has free slots for: of the present piece, then of the next.
    __device__ void request(StreamTiles& tiles, StreamTiles& next, int lane) {
#pragma unroll 1
        while (open_ < w_.stages) {
            const bool is_next = tiles.requested == tiles.count;
            if (is_next && next.requested == next.count) return;
            const int row =
                __shfl_sync(~0u, is_next ? next.row : tiles.row, is_next ? next.requested : tiles.requested);
            if (lane == 0) {
                const uint64_t policy = read_once_policy();
                const uint32_t to = tiles_ + filled_ * Layout::kTileBytes, barrier = arrived_ + filled_ * 8;
                expect_bytes(barrier, Layout::kTileBytes);
#pragma unroll
                for (int line = 0; line < Layout::kLines; ++line)
                    copy_box(to + line * Layout::kBoxBytes, w_.keys, line * kLineElements, row, barrier, policy);
#pragma unroll
                for (int line = 0; line < Layout::kLines; ++line)
                    copy_box(to + Layout::kPoolBytes + line * Layout::kBoxBytes, w_.values, line * kLineElements, row,
                             barrier, policy);
            }
            if (++filled_ == w_.stages) filled_ = 0;
            (is_next ? next.requested : tiles.requested) += 1;
            ++open_;
        }
    }

    // The shared address of the next tile, when it is there.
    __device__ uint32_t wait() const {
        wait_bytes(arrived_ + emptied_ * 8, phase_);
        return tiles_ + emptied_ * Layout::kTileBytes;
    }

    // All lanes of the warp have read it.
    __device__ void release() {
        __syncwarp();
        --open_;
        if (++emptied_ < w_.stages) return;
        emptied_ = 0;
        phase_ ^= 1;
    }

  private:
    const StreamWork& w_;
    const uint32_t tiles_, arrived_;
    int filled_ = 0, emptied_ = 0, open_ = 0;  // the places to fill and to read next; tiles requested for and not read
    uint32_t phase_ = 0;
};

#endif

}  // namespace tide::cuda
