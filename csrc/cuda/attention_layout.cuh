// Where keys, values, queries and sums of the tensor-core attention lie in shared memory, and how they get there.
//
// A tile's keys and values lie as they do in the page, rows of 16-byte vectors, swizzled so that no access has bank
// conflicts:
//
//     keys, queries:  the halves of a 128-byte line are swapped in odd rows
//     values:         vector v of position s lies at v ^ 2 * (s / 2 % 4)
#pragma once

#include "cuda/attention_work.cuh"
#include "cuda/tensor_core.cuh"

namespace tide::cuda {

constexpr int kTilePositions = 16;

// kDim: head_dim rounded up to 64, 96, 128 or 256. kLaneTiles: 16 lanes each. kSmall: for devices with little shared
// memory. The warps divide a chunk among them, so numbers depend on kDim and kSmall, but not on kLaneTiles.
template <int kDim_, int kLaneTiles_, bool kSmall>
struct AttentionLayout {
    static constexpr int kDim = kDim_, kLaneTiles = kLaneTiles_, kLanes = kLaneTiles * 16;
    static constexpr int kWarps = (kSmall ? 4 : 8) / (kDim > 128 ? 2 : 1);
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kTurnPositions = kWarps * kTilePositions;  // from a tile of a warp to its next
    static constexpr bool kCounts = kLaneTiles == 1;                // can add up the chunks of its lanes
    static constexpr int kKeyVectors = kDim / kVector;
    static constexpr int kValueBlocks = (kDim + 63) / 64;
    static constexpr int kValueVectors = kValueBlocks * 8;
    static constexpr int kKeyBytes = kTilePositions * kKeyVectors * kVectorBytes;
    static constexpr int kValueBytes = kTilePositions * kValueVectors * kVectorBytes;
    static constexpr int kStageBytes = kKeyBytes + kValueBytes;
    static constexpr int kStages = kDim <= 64 ? 4 : 2;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kQueryBytes = kLanes * kKeyVectors * kVectorBytes;  // of a piece; the next one has its own
    static constexpr int kSumRows = kSmall ? 1 : 2;                  // 8 lanes each, whose sums the warps add at once
    static constexpr int kSumStride = kValueBlocks * 64;             // floats of a lane
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

// Starts the copy of a piece's queries; lanes that do not exist become zero.
template <typename Layout>
__device__ inline void copy_queries(const AttentionWork& p, const Piece& piece, uint32_t to) {
    constexpr int kVectors = Layout::kLanes * Layout::kKeyVectors;
#pragma unroll 1  // once or twice
    for (int i = threadIdx.x; i < kVectors; i += Layout::kThreads) {
        const int row = i / Layout::kKeyVectors, vector = i % Layout::kKeyVectors;
        const int index = piece.first_lane + row, query = p.by_group(index);
        const bool exists = row < piece.num_lanes && vector * kVector < p.head_dim;
        const int64_t offset = (piece.first_query + query) * p.q_token_stride +
                               (piece.kv_head * p.group + index - query * p.group) * p.q_head_stride + vector * kVector;
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
#pragma unroll(kExact || (Layout::kDim == 96 && Layout::kLaneTiles == 1) \
                   ? kSteps                                              \
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

}  // namespace tide::cuda
