// What a piece needs of its pass's projection: queries, and keys and values where it holds positions of the pass.
//
// A team of threads makes one head at a time, with the bits of rotary_write: a warp, or half of one where heads are
// narrow. New keys and values go to the pools for later passes, and to shared memory for this piece: what the pools
// hold at their places is of no use yet.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/stream_state.cuh"
#include "cuda/small/rotary_head.cuh"

namespace tide::cuda {

// Attention, and what happens to its queries before. Not joined: nothing, they are in place.
struct StreamWork {
    AttentionWork attention;
    RotaryWriteParams rotary = {};
    bool joined = false, aligned = true;
    bool reads_early = false;      // indices and pages, before wait_for_previous()
    bool reads_old_pages = false;  // with it: not those of the queries' own positions, which the kernel before writes
    CUtensorMap keys = {}, values = {};
    ScoreScale scale;
    Divider by_chunk = Divider(1);  // by the pieces of a chunk, where all rows have max_queries
    int stages = 0;

    explicit StreamWork(const PagedAttentionParams& p) : attention(p), scale(attention) {}
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

// From there on tiles are not yet what they must be.
__device__ inline int patched_from(const StreamWork& w, const Piece& piece) {
    const NewPositions new_positions(w, piece);
    return new_positions.count > 0 ? min(new_positions.first, piece.end()) : piece.end();
}

// The new heads of a piece, made before its tiles are read.
template <typename T, int kDim>
struct NewHeads {
    alignas(16) T keys[kMostJoinedQueries][kDim];
    alignas(16) T values[kMostJoinedQueries][kDim];
    int slots[kMostJoinedQueries];  // -1: none
};

#if TIDE_HAS_BULK_COPY

// Where tokens stand and go; -1 where there is no such place. kAhead: the first of them are read before it is known
// which of them a piece needs.
template <bool kAhead>
class NewTokens {
  public:
    __device__ NewTokens(const StreamWork& w, int lane, const IndexReader& read) : position_(-1), slot_(-1) {
        if (!kAhead || !w.joined || lane >= w.rotary.rows) return;
        position_ = read_position(w.rotary, lane, read);
        slot_ = read_slot(w.rotary, lane, read);
    }
    // All lanes of a warp call these, each with a token of its own, or any where it has none.
    __device__ int position(const RotaryWriteParams& p, int token) const {
        const int known = kAhead ? __shfl_sync(~0u, position_, token % 32) : -1;
        if (kAhead && token < 32) return known;
        return token < p.rows ? read_position(p, token) : -1;
    }
    __device__ int slot(const RotaryWriteParams& p, int token) const {
        const int known = kAhead ? __shfl_sync(~0u, slot_, token % 32) : -1;
        if (kAhead && token < 32) return known;
        return token < p.rows ? read_slot(p, token) : -1;
    }

  private:
    __device__ static int read_position(const RotaryWriteParams& p, int token, const IndexReader& read = {}) {
        const int64_t position = p.positions == nullptr ? token : read(p.positions + token);
        return position < 0 || position >= p.num_positions ? -1 : static_cast<int>(position);
    }
    __device__ static int read_slot(const RotaryWriteParams& p, int token, const IndexReader& read = {}) {
        const int64_t slot = read(p.slots + token);
        return slot < 0 || slot >= p.num_blocks * p.block_size ? -1 : static_cast<int>(slot);
    }
    int position_, slot_;  // of the token that has this thread's number
};

// A thread's elements of the heads of a projection, normed and rotated as rotary_write does. They are loaded as they
// lie in memory and widened when they are rotated: loads do not wait for each other.
template <typename T, int kDim>
class HeadRotator {
  public:
    static constexpr int kTeam = kDim / 4;        // threads of a head
    static constexpr int kTeams = kWarp / kTeam;  // of a warp
    struct RawPair {
        RawTwo<T> low, high;
    };
    struct Raw {
        RawPair x, cos, sin, norm;
        bool placed;
    };

    __device__ explicit HeadRotator(const StreamWork& w) : w_(w), at_(2 * (threadIdx.x % kTeam)) {}

    // Of the warp, that this thread belongs to.
    __device__ static int team() { return threadIdx.x % kWarp / kTeam; }

    __device__ RawPair load(const void* head) const {
        const T *low = static_cast<const T*>(head) + at_, *high = low + kDim / 2;
        if (w_.aligned) return {*reinterpret_cast<const RawTwo<T>*>(low), *reinterpret_cast<const RawTwo<T>*>(high)};
        return {{low[0], low[1]}, {high[0], high[1]}};
    }
    __device__ Raw load(const T* head, int position, const void* norm) const {
        const RotaryWriteParams& p = w_.rotary;
        Raw raw = {load(head), {}, {}, {}, position >= 0};
        if (raw.placed) {
            raw.cos = load(static_cast<const T*>(p.cos) + int64_t{position} * kDim);
            raw.sin = load(static_cast<const T*>(p.sin) + int64_t{position} * kDim);
        }
        if (norm != nullptr) raw.norm = load(norm);
        return raw;
    }
    __device__ static HeadPair widen(const RawPair& raw) {
        return {{to_float(raw.low.a), to_float(raw.low.b)}, {to_float(raw.high.a), to_float(raw.high.b)}};
    }
    __device__ HeadPair turn(const Raw& raw, const void* norm) const {
        const HeadPair missing = {{NAN, NAN}, {NAN, NAN}};
        HeadPair x = widen(raw.x);
        if (w_.rotary.q_norm != nullptr || w_.rotary.k_norm != nullptr) {  // the same for all teams: they shuffle
            const float scale = norm_scale<kTeam>(add_squares(x, 0.0f), kDim, w_.rotary.eps);
            if (norm != nullptr) x = normed<T>(x, scale, widen(raw.norm));
        }
        return rotated<T>(x, raw.placed ? Angles{widen(raw.cos), widen(raw.sin)} : Angles{missing, missing});
    }
    // store(dim, two elements from there on), twice.
    template <typename Store>
    __device__ void each(const HeadPair& pair, Store&& store) const {
        store(at_, pair.low);
        store(kDim / 2 + at_, pair.high);
    }

  private:
    const StreamWork& w_;
    const int at_;
};

__device__ inline int64_t query_offset(const AttentionWork& p, const Piece& piece, int row) {
    const int index = piece.first_query_head + row, query = p.by_heads_per_kv(index);
    return int64_t{piece.first_query + query} * p.q_token_stride +
           (piece.kv_head * p.heads_per_kv + index - query * p.heads_per_kv) * p.q_head_stride;
}

// Starts the copy of the at-th vector of a piece's queries to its place in `queries`.
template <typename T, typename Layout>
__device__ inline void copy_query_vector(const AttentionWork& p, const Piece& piece, char* queries, int at) {
    constexpr int kVectors = Layout::kDim / kVector;
    const int row = at / kVectors, vector = at % kVectors;
    const bool exists = row < piece.num_query_heads;
    const int64_t offset = exists ? query_offset(p, piece, row) + vector * kVector : 0;
    copy_async_or_zero(shared_address(queries) + line_offset(Layout::kQueryHeads, row, vector),
                       static_cast<const T*>(p.q) + offset, exists);
}

// Starts the copy of a piece's queries as lines to `queries`, query heads that do not exist as zeros.
template <typename T, typename Layout>
__device__ inline void copy_queries(const AttentionWork& p, const Piece& piece, char* queries) {
    constexpr int kAll = Layout::kQueryHeads * (Layout::kDim / kVector);
#pragma unroll
    for (int at = threadIdx.x; at < kAll; at += Layout::kThreads) copy_query_vector<T, Layout>(p, piece, queries, at);
}

// The same of a joined pass; and the piece's new heads, one to a warp, which the first piece of their query heads also
// writes to the pools. A warp has kRows queries and perhaps a key, with its value; its teams take them in turn, all of
// them by the same code.
template <typename T, typename Layout>
__device__ inline void make_heads(const StreamWork& w, const Piece& piece, const NewPositions& new_positions,
                                  const NewTokens<Layout::kHoldsPiece>& tokens, char* queries,
                                  NewHeads<T, Layout::kDim>& heads, int warp) {
    constexpr int kDim = Layout::kDim, kRows = Layout::kQueryHeads / Layout::kWarps;
    static_assert(kMostJoinedQueries == Layout::kWarps);
    using Rotator = HeadRotator<T, kDim>;
    constexpr int kTurns = (kRows + Rotator::kTeams) / Rotator::kTeams;  // kRows queries and a key
    const AttentionWork& p = w.attention;
    const RotaryWriteParams& r = w.rotary;
    const Rotator rotator(w);
    const int mine = Layout::kWarps - 1 - warp, new_token = new_positions.token + mine;
    const int slot = tokens.slot(r, new_token);
    typename Rotator::Raw raw[kTurns] = {};
    typename Rotator::RawPair raw_value = {};
    const auto task_of = [](int turn) { return turn * Rotator::kTeams + Rotator::team(); };
    const auto makes_key = [&](int turn) { return task_of(turn) == kRows && mine < new_positions.count; };
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int row = warp * kRows + task_of(turn);
        const bool key = makes_key(turn), query = task_of(turn) < kRows && row < piece.num_query_heads;
        const int position =
            tokens.position(r, key ? new_token : piece.first_query + p.by_heads_per_kv(piece.first_query_head + row));
        const T* head =
            key ? head_of<T>(r.k, new_token, piece.kv_head) : static_cast<const T*>(p.q) + query_offset(p, piece, row);
        if (!query && !key) continue;
        raw[turn] = rotator.load(head, position, key ? r.k_norm : r.q_norm);
        if (key) raw_value = rotator.load(head_of<T>(r.v, new_token, piece.kv_head));
    }
    const bool written = piece.first_query_head == 0 && slot >= 0;
    const auto in_pool = [&](void* pool) {  // the place of the new head
        const int block = p.by_page_units(max(slot, 0) / AttentionWork::kPageUnit);
        const int64_t first = int64_t{block} * p.kv_heads + piece.kv_head - block;
        return static_cast<T*>(pool) + (first * p.page_units * AttentionWork::kPageUnit + slot) * kDim;
    };
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int row = warp * kRows + task_of(turn);
        const bool key = makes_key(turn), query = task_of(turn) < kRows;
        HeadPair pair = rotator.turn(raw[turn], query ? r.q_norm : r.k_norm);
        if (query && row >= piece.num_query_heads) pair = {};
        rotator.each(pair, [&](int dim, Two two) {
            char* place_of_query = queries + line_offset(Layout::kQueryHeads, row, dim / kVector) + dim % kVector * 2;
            T* to = query ? reinterpret_cast<T*>(place_of_query) : heads.keys[mine] + dim;
            if (query || key) store_two(to, two, 2, true);
            if (key && written) store_two(in_pool(r.k_pool) + dim, two, 2, true);
        });
        if (!key) continue;
        rotator.each(rotator.widen(raw_value), [&](int dim, Two two) {
            store_two(heads.values[mine] + dim, two, 2, true);
            if (written) store_two(in_pool(r.v_pool) + dim, two, 2, true);
        });
        if (threadIdx.x % Rotator::kTeam == 0) heads.slots[mine] = slot;
    }
}

// Makes the tile of 16 positions from `begin` on what it must be: new heads where the pass has tokens, and zeros for
// values past the end, which must not be multiplied with. `row`: where the tile lies in the pools, in rows of a head.
template <typename T, typename Layout>
__device__ inline void patch_tile(const StreamWork& w, const Piece& piece, const NewHeads<T, Layout::kDim>& heads,
                                  char* tile, int begin, int row, int lane) {
    constexpr int kVectors = Layout::kDim / kVector;
    const NewPositions new_positions(w, piece);
    const AttentionWork& p = w.attention;
    // New head `lane` is of use if its slot is the place that the tile has for its position: else the page's own stays.
    const int at = new_positions.first + lane - begin, page = p.by_page_units((row + at) / AttentionWork::kPageUnit);
    const int others = page - p.by_kv_heads(page);  // pages before this one that are not of this head
    const bool used = lane < new_positions.count && at >= 0 && at < kTilePositions &&
                      heads.slots[lane] == row + at - others * p.page_units * AttentionWork::kPageUnit;
    const unsigned int all_used = __ballot_sync(~0u, used);
#pragma unroll 4
    for (int v = lane; v < new_positions.count * 2 * kVectors; v += 32) {
        const int i = v / (2 * kVectors), vector = v % kVectors;
        const bool value = v / kVectors % 2 != 0;
        if (!(all_used >> i & 1)) continue;
        const T* from = (value ? heads.values[i] : heads.keys[i]) + vector * kVector;
        *reinterpret_cast<uint4*>(tile + (value ? Layout::kPoolBytes : 0) +
                                  line_offset(kTilePositions, new_positions.first + i - begin, vector)) =
            *reinterpret_cast<const uint4*>(from);
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
