// What a piece needs of its pass's projection: queries, and keys and values where it holds positions of the pass.
//
// A warp makes one head at a time, with the bits of rotary_write. New keys and values go to the pools for later passes,
// and to shared memory for this piece: what the pools hold at their places is of no use yet.
#pragma once

#include "cuda/attention_stream.h"
#include "cuda/attention_stream_state.cuh"
#include "cuda/rotary_head.cuh"

namespace tide::cuda {

// Attention, and what happens to its queries before. Not joined: nothing, they are in place.
struct StreamWork {
    AttentionWork attention;
    RotaryWriteParams rotary;
    bool joined, aligned;
    CUtensorMap keys, values;
    int stages;
};

// The positions of a piece that this pass has tokens for.
struct NewPositions {
    int first, count, token;  // token of the first one

    __device__ NewPositions(const StreamWork& w, const Piece& piece) {
        const int from = piece.length - piece.num_queries;
        first = max(from, piece.begin());
        count = w.joined ? min(max(piece.end() - first, 0), kMostJoinedQueries) : 0;
        token = piece.first_query + first - from;
    }
};

// Made ahead of the tiles: the new heads of a piece.
template <typename T, int kDim>
struct NewHeads {
    alignas(16) T keys[kMostJoinedQueries][kDim];
    alignas(16) T values[kMostJoinedQueries][kDim];
    int64_t slots[kMostJoinedQueries];
};

#if TIDE_HAS_BULK_COPY

// A thread's elements of the heads of a projection, normed and turned as rotary_write does. Remembers the angles of the
// token it had last: its heads follow each other.
template <typename T, int kDim>
class HeadTurner {
  public:
    __device__ explicit HeadTurner(const StreamWork& w) : w_(w), at_(2 * (threadIdx.x % kWarp)) {}

    // kDim is 64 or 128: a thread has one pair, or the upper half of the warp none.
    __device__ bool has_pair() const { return at_ < kDim / 2; }
    __device__ int low() const { return at_; }
    __device__ int high() const { return kDim / 2 + at_; }

    __device__ HeadPair load(const T* x) const {
        return has_pair() ? load_pair(x, kDim / 2, at_, w_.aligned) : HeadPair{};
    }
    __device__ HeadPair turn(HeadPair x, int token, const void* norm) {
        const RotaryWriteParams& p = w_.rotary;
        if (token != token_ && has_pair()) {
            const int64_t position = p.positions == nullptr ? token : p.positions[token];
            angles_ = load_angles<T>(p, kDim, position, at_, w_.aligned);
        }
        token_ = token;
        if (norm != nullptr)
            x = normed<T>(x, norm_scale(add_squares(x, 0.0f), kDim, p.eps), load(static_cast<const T*>(norm)));
        return turned<T>(x, angles_);
    }

  private:
    const StreamWork& w_;
    const int at_;
    int token_ = -1;
    Angles angles_ = {};
};

// The queries of a piece as lines in `queries`, lanes that do not exist as zeros.
template <typename T, typename Layout>
__device__ inline void copy_queries(const AttentionWork& p, const Piece& piece, char* queries) {
    constexpr int kVectors = Layout::kDim / kVector, kAll = Layout::kLanes * kVectors;
    constexpr int kEach = (kAll + Layout::kThreads - 1) / Layout::kThreads;
    uint4 loaded[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = i * Layout::kThreads + threadIdx.x, row = at / kVectors, index = piece.first_lane + row;
        const int query = p.by_group(index);
        const int64_t offset = (piece.first_query + query) * p.q_token_stride +
                               (piece.kv_head * p.group + index - query * p.group) * p.q_head_stride;
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (row < piece.num_lanes)
            loaded[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + offset + at % kVectors * kVector);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = i * Layout::kThreads + threadIdx.x;
        if (at >= kAll) break;
        *reinterpret_cast<uint4*>(queries + line_offset(Layout::kLanes, at / kVectors, at % kVectors)) = loaded[i];
    }
}

// The same of a joined pass; and the piece's new heads, which the first piece of their lanes also writes to the pools.
template <typename T, typename Layout>
__device__ inline void make_heads(const StreamWork& w, const Piece& piece, const NewPositions& fresh, char* queries,
                                  NewHeads<T, Layout::kDim>& heads, int warp) {
    constexpr int kDim = Layout::kDim, kRows = Layout::kLanes / Layout::kWarps;  // neighbours share their angles
    const AttentionWork& p = w.attention;
    const RotaryWriteParams& r = w.rotary;
    HeadTurner<T, kDim> turner(w);
    const auto query_of = [&](int row) {
        const int index = piece.first_lane + row, query = p.by_group(index), token = piece.first_query + query;
        return static_cast<const T*>(p.q) + int64_t{token} * p.q_token_stride +
               (piece.kv_head * p.group + index - query * p.group) * p.q_head_stride;
    };
    const int first = warp * kRows, last = min(first + kRows, piece.num_lanes);
    HeadPair next = first < last ? turner.load(query_of(first)) : HeadPair{};
#pragma unroll 1
    for (int i = Layout::kWarps - 1 - warp; i < fresh.count; i += Layout::kWarps) {
        const int token = fresh.token + i;
        const int64_t slot = r.slots[token], written = piece.first_lane == 0 ? slot : -1;
        const T* value = head_of<T>(r.v, token, piece.kv_head);
        const HeadPair raw = turner.load(head_of<T>(r.k, token, piece.kv_head)), copied = turner.load(value);
        T* key_place = place_of<T>(r, r.k_pool, r.k.heads, written, piece.kv_head, kDim);
        T* value_place = place_of<T>(r, r.v_pool, r.v.heads, written, piece.kv_head, kDim);
        const HeadPair key = turner.turn(raw, token, r.k_norm);
        if (threadIdx.x % kWarp == 0) heads.slots[i] = slot;
        if (!turner.has_pair()) continue;
        const auto store = [&](T* to, const HeadPair& pair) {
            store_two(to + turner.low(), pair.low, 2, true);
            store_two(to + turner.high(), pair.high, 2, true);
        };
        store(heads.keys[i], key);
        store(heads.values[i], copied);
        if (key_place == nullptr) continue;
        store(key_place, key);
        store(value_place, copied);
    }
#pragma unroll 1
    for (int row = first; row < first + kRows; ++row) {
        HeadPair pair = next;
        if (row + 1 < last) next = turner.load(query_of(row + 1));  // while this one is turned
        if (row < last) pair = turner.turn(pair, piece.first_query + p.by_group(piece.first_lane + row), r.q_norm);
        if (row >= last) pair = HeadPair{};
        if (!turner.has_pair()) continue;
        const auto store = [&](int dim, Two v) {
            char* to = queries + line_offset(Layout::kLanes, row, dim / kVector) + dim % kVector * 2;
            store_two(reinterpret_cast<T*>(to), v, 2, true);
        };
        store(turner.low(), pair.low);
        store(turner.high(), pair.high);
    }
}

// Makes the tile of 16 positions from `begin` on what it must be: new heads where the pass has tokens, and zeros for
// values past the end, which nobody may multiply with. `row`: where the tile lies in the pools, in rows of a head.
template <typename T, typename Layout>
__device__ inline void mend_tile(const StreamWork& w, const Piece& piece, const NewPositions& fresh,
                                 const NewHeads<T, Layout::kDim>& heads, char* tile, int begin, int row, int lane) {
    constexpr int kVectors = Layout::kDim / kVector;
    const AttentionWork& p = w.attention;
    for (int r = max(fresh.first - begin, 0); r < min(fresh.first + fresh.count - begin, kTilePositions); ++r) {
        const int i = begin + r - fresh.first, block_size = p.page_units * AttentionWork::kPageUnit;
        const int block = (row + r) / block_size / p.kv_heads, slot = block * block_size + (row + r) % block_size;
        if (heads.slots[i] != slot) continue;  // not written there: the page's own stay
        for (int v = lane; v < 2 * kVectors; v += 32) {
            const bool value = v >= kVectors;
            const T* from = (value ? heads.values[i] : heads.keys[i]) + v % kVectors * kVector;
            *reinterpret_cast<uint4*>(tile + (value ? Layout::kPoolBytes : 0) +
                                      line_offset(kTilePositions, r, v % kVectors)) =
                *reinterpret_cast<const uint4*>(from);
        }
    }
    const int missing = max(begin + kTilePositions - piece.end(), 0);
    for (int v = lane; v < missing * kVectors; v += 32)
        *reinterpret_cast<uint4*>(tile + Layout::kPoolBytes +
                                  line_offset(kTilePositions, kTilePositions - 1 - v / kVectors, v % kVectors)) =
            make_uint4(0, 0, 0, 0);
    order_before_copies();
    __syncwarp();
}

#endif

}  // namespace tide::cuda
