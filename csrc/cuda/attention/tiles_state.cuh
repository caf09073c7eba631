// Where keys, values, queries and sums of the tensor-core attention lie in shared memory, and how they get there.
//
// A tile's keys and values lie as they do in the page, rows of 16-byte vectors, swizzled so that no access has bank
// conflicts:
//
//     keys, queries:  the halves of a 128-byte line are swapped in odd rows
//     values:         vector v of position s lies at v ^ 2 * (s / 2 % 4)
#pragma once

#include "cuda/attention/work.cuh"
#include "cuda/common/ptx/tensor_core.cuh"

namespace tide::cuda {

constexpr int kTilePositions = 16;

// kDim: head_dim rounded up to 64, 96, 128 or 256. kQueryTiles: 16 query heads each. kSmall: for devices with little
// shared memory. The warps divide a chunk among them, so indices depend on kDim and kSmall, but not on kQueryTiles.
template <int kDim_, int kLaneTiles_, bool kSmall>
struct AttentionLayout {
    static constexpr int kDim = kDim_, kQueryTiles = kLaneTiles_, kQueryHeads = kQueryTiles * 16;
    static constexpr int kWarps = (kSmall ? 4 : 8) / (kDim > 128 ? 2 : 1);
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kStridePositions = kWarps * kTilePositions;  // from a tile of a warp to its next
    static constexpr bool kCounts = kQueryTiles == 1;                 // can add up the chunks of its query heads
    static constexpr int kKeyVectors = kDim / kVector;
    static constexpr int kValueBlocks = (kDim + 63) / 64;
    static constexpr int kValueVectors = kValueBlocks * 8;
    static constexpr int kKeyBytes = kTilePositions * kKeyVectors * kVectorBytes;
    static constexpr int kValueBytes = kTilePositions * kValueVectors * kVectorBytes;
    static constexpr int kStageBytes = kKeyBytes + kValueBytes;
    static constexpr int kStages = kDim <= 64 ? 4 : 2;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kQueryBytes =
        kQueryHeads * kKeyVectors * kVectorBytes;         // of a piece; the next one has its own
    static constexpr int kSumRows = kSmall ? 1 : 2;       // 8 query heads each, whose sums the warps add at once
    static constexpr int kSumStride = kValueBlocks * 64;  // floats of a query head
    static constexpr int kSumBytes = kSumRows * 8 * kSumStride * 4;  // of a warp
    static constexpr int kSharedBytes = kWarps * (kWarpBytes + kSumBytes) + 2 * kQueryBytes;
    static_assert(kLargestChunk / kTilePositions / kWarps <= 32, "a thread of a warp knows the pages of one tile");
};

// Byte offset of a vector of a key or query row.
template <int kVectors>
__device__ inline int key_offset(int row, int vector) {
    const int swapped = kVectors % 8 == 0 ? vector ^ ((row & 1) << 2) : vector;  // odd lines differ by themselves
    return (row * kVectors + swapped) * kVectorBytes;
}

template <int kVectors>
__device__ inline int value_offset(int position, int vector) {
    return (position * kVectors + (vector ^ ((position >> 1 & 3) << 1))) * kVectorBytes;
}

// Index of a float of a warp's sums: vectors of four, swizzled.
template <int kStride>
__device__ inline int sum_index(int lane, int dim) {
    return lane * kStride + ((dim / 4) ^ (lane & 7)) * 4;
}

#if TIDE_HAS_TENSOR_CORE_PATH

// Starts the copy of a piece's queries; query heads that do not exist become zero.
template <typename Layout>
__device__ inline void copy_queries(const AttentionWork& p, const Piece& piece, uint32_t to) {
    constexpr int kVectors = Layout::kQueryHeads * Layout::kKeyVectors;
#pragma unroll 1  // once or twice
    for (int i = threadIdx.x; i < kVectors; i += Layout::kThreads) {
        const int row = i / Layout::kKeyVectors, vector = i % Layout::kKeyVectors;
        const int index = piece.first_query_head + row, query = p.by_heads_per_kv(index);
        const bool exists = row < piece.num_query_heads && vector * kVector < p.head_dim;
        const int64_t offset = (piece.first_query + query) * p.q_token_stride +
                               (piece.kv_head * p.heads_per_kv + index - query * p.heads_per_kv) * p.q_head_stride +
                               vector * kVector;
        copy_async_or_zero(to + key_offset<Layout::kKeyVectors>(row, vector),
                           static_cast<const char*>(p.q) + (exists ? offset * 2 : 0), exists);
    }
}

// Starts the copy of 16 positions of one pool, `count` of which exist; the others become zero. `from`: where each 8 of
// them begin. kExact: heads are kDim wide, and then even positions that do not exist have addresses.
template <typename Layout, bool kValues, bool kExact>
__device__ inline void copy_positions(const char* const (&from)[2], int dims, int count, uint32_t to, int lane,
                                      uint64_t policy) {
    constexpr int kVectors = kValues ? Layout::kValueVectors : Layout::kKeyVectors;
    constexpr int kSteps = kTilePositions * kVectors / 32;
#pragma unroll(kExact || (Layout::kDim == 96 && Layout::kQueryTiles == 1) \
                   ? kSteps                                               \
                   : 1)  // little code for heads that are not made
    for (int i = 0; i < kSteps; ++i) {
        const int at = i * 32 + lane, position = at / kVectors, vector = at % kVectors;
        const char* page = i < kSteps / 2 ? from[0] : from[1];
        const int offset = kValues ? value_offset<kVectors>(position, vector) : key_offset<kVectors>(position, vector);
        if (kExact) {
            copy_async_or_zero(to + offset,
                               page + (position % AttentionWork::kPageUnit * Layout::kDim + vector * kVector) * 2,
                               position < count, policy);
        } else {
            const bool exists = position < count && vector * kVector < dims;
            copy_async_or_zero(to + offset,
                               page + (exists ? position % AttentionWork::kPageUnit * dims + vector * kVector : 0) * 2,
                               exists, policy);
        }
    }
}

// Starts the copy of a tile, `count` of whose positions exist. Pages are counted in units of 8 positions of a head.
template <typename Layout>
__device__ inline void copy_tile(const AttentionWork& p, const int (&pages)[2], int count, uint32_t to, int lane,
                                 uint64_t policy) {
    const int dims = static_cast<int>(p.head_dim), unit_bytes = AttentionWork::kPageUnit * dims * 2;
    const int64_t offsets[2] = {int64_t{pages[0]} * unit_bytes, int64_t{pages[1]} * unit_bytes};
    const char* keys = static_cast<const char*>(p.k_pool);
    const char* values = static_cast<const char*>(p.v_pool);
    const char* const from_keys[2] = {keys + offsets[0], keys + offsets[1]};
    const char* const from_values[2] = {values + offsets[0], values + offsets[1]};
    if (Layout::kDim % 64 == 0 && dims == Layout::kDim) {
        copy_positions<Layout, false, true>(from_keys, dims, count, to, lane, policy);
        copy_positions<Layout, true, true>(from_values, dims, count, to + Layout::kKeyBytes, lane, policy);
    } else {
        copy_positions<Layout, false, false>(from_keys, dims, count, to, lane, policy);
        copy_positions<Layout, true, false>(from_values, dims, count, to + Layout::kKeyBytes, lane, policy);
    }
}

#endif

// What one warp of the tensor-core attention keeps: the 16 rows of a product are query heads (query, head).
//
// scores = Q K^T: thread t of a quad holds dims 8t to 8t + 7 of each 32, of Q and of K alike, so one vector feeds two
// products. out = P V: column g of product j is dim 8g + j, so one vector of V feeds eight products; neighbouring
// positions are paired with a byte permutation.

#if TIDE_HAS_TENSOR_CORE_PATH

// One warp's online softmax over its tiles. Index [2 * m + r]: query head 16 m + 8 r + g.
template <typename T, typename Layout>
struct WarpState {
    static constexpr int kDim = Layout::kDim, kQueryTiles = Layout::kQueryTiles;
    float sums[kQueryTiles][Layout::kValueBlocks][8][4] = {};
    float max_scores[2 * kQueryTiles];
    float totals[2 * kQueryTiles] = {};  // of this thread's positions only

    __device__ WarpState() {
#pragma unroll
        for (float& max_score : max_scores) max_score = kNothing;
    }

    // `queries` and `tile` are shared addresses. `masked`: some query head does not see all of the 16 positions from
    // `first` on; query heads see the `visible` positions before their `ends`.
    __device__ void accumulate(uint32_t queries, uint32_t tile, const ScoreScale& scale, bool masked, int first,
                               const int (&ends)[2 * kQueryTiles], int visible, int g, int t) {
        float scores[kQueryTiles][2][4] = {};
#pragma unroll(kDim > 128 ? 2 : kDim / 32)  // wide heads have no registers left for addresses
        for (int j = 0; j < kDim / 32; ++j) {
            uint4 key[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                key[n] = load_shared(tile + key_offset<Layout::kKeyVectors>(n * 8 + g, j * 4 + t));
#pragma unroll
            for (int m = 0; m < kQueryTiles; ++m) {
                const uint4 low = load_shared(queries + key_offset<Layout::kKeyVectors>(m * 16 + g, j * 4 + t));
                const uint4 high = load_shared(queries + key_offset<Layout::kKeyVectors>(m * 16 + g + 8, j * 4 + t));
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    multiply_tile(scores[m][n], low.x, high.x, low.y, high.y, key[n].x, key[n].y, T{});
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    multiply_tile(scores[m][n], low.z, high.z, low.w, high.w, key[n].z, key[n].w, T{});
            }
        }
        uint32_t weights[kQueryTiles][4];
        bool grew = false;
        float shrink[2 * kQueryTiles];
#pragma unroll
        for (int m = 0; m < kQueryTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 2 * m + r;
                float v[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = scale.quick(scores[m][i / 2][r * 2 + i % 2]);
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int position = first + i / 2 * 8 + t * 2 + i % 2;
                        if (position >= ends[row] || position < ends[row] - visible) v[i] = kNothing;
                    }
                }
                float max_score = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
                max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, 1));
                max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, 2));
                max_score = fmaxf(max_score, max_scores[row]);
                const float base = base_of(max_score);
                shrink[row] = exp2_fast(max_scores[row] - base);
                grew |= max_score != max_scores[row];
                max_scores[row] = max_score;
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = exp2_fast(v[i] - base);
                totals[row] = totals[row] * shrink[row] + ((v[0] + v[1]) + (v[2] + v[3]));
                weights[m][r] = pack(v[0], v[1], T{});
                weights[m][2 + r] = pack(v[2], v[3], T{});
            }
        }
        if (__any_sync(~0u, grew)) {  // else all factors are one
#pragma unroll
            for (int m = 0; m < kQueryTiles; ++m) {
#pragma unroll
                for (int b = 0; b < Layout::kValueBlocks; ++b) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[m][b][j][i] *= shrink[2 * m + i / 2];
                    }
                }
            }
        }
#pragma unroll
        for (int b = 0; b < Layout::kValueBlocks; ++b) {
            uint4 value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                value[i] = load_shared(tile + Layout::kKeyBytes +
                                       value_offset<Layout::kValueVectors>(i / 2 * 8 + t * 2 + i % 2, b * 8 + g));
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint32_t pick = j % 2 ? 0x7632 : 0x5410;  // the high or low halves of two words
                const uint32_t b0 = __byte_perm(word(value[0], j / 2), word(value[1], j / 2), pick);
                const uint32_t b1 = __byte_perm(word(value[2], j / 2), word(value[3], j / 2), pick);
#pragma unroll
                for (int m = 0; m < kQueryTiles; ++m)
                    multiply_tile(sums[m][b][j], weights[m][0], weights[m][1], weights[m][2], weights[m][3], b0, b1,
                                  T{});
            }
        }
    }

    // Sums [lane][dim] and stats [lane] of the 8 * kSumRows query heads from 8 * first_row on, to shared memory.
    __device__ void store_partial(float* to, float2* stats, int first_row, int num_query_heads, int g, int t) {
#pragma unroll
        for (int r = 0; r < Layout::kSumRows; ++r) {
            const int row = first_row + r, lane = r * 8 + g;
            float total = totals[row];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (row * 8 + g >= num_query_heads) continue;
            if (t == 0) stats[lane] = make_float2(max_scores[row], total);
#pragma unroll
            for (int b = 0; b < Layout::kValueBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const auto& from = sums[row / 2][b];
                    const int i = row % 2 * 2 + c;
                    const int dim = b * 64 + t * 16 + c * 8;
                    *reinterpret_cast<float4*>(to + sum_index<Layout::kSumStride>(lane, dim)) =
                        make_float4(from[0][i], from[1][i], from[2][i], from[3][i]);
                    *reinterpret_cast<float4*>(to + sum_index<Layout::kSumStride>(lane, dim + 4)) =
                        make_float4(from[4][i], from[5][i], from[6][i], from[7][i]);
                }
            }
        }
    }

    __device__ static uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};

#endif

}  // namespace tide::cuda
