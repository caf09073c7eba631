// Paged attention with tensor cores: the 16 rows of a product are lanes (query, head of the group).
//
// The four warps of a CTA take the chunk's tiles of 16 positions in turn, each with its own copies in flight and its
// own online softmax, and meet only at the end of the chunk. A tile's keys and values lie in shared memory as they do
// in the page, rows of 16-byte vectors, swizzled so that no access has bank conflicts:
//
//     keys:    the halves of a 128-byte line are swapped in odd positions
//     values:  vector v of position s lies at v ^ 2 * (s / 2 % 4)
//
// scores = Q K^T: thread t of a quad holds dims 8t to 8t + 7 of each 32, of Q and of K alike, so one vector feeds two
// products. out = P V: column g of product j is dim 8g + j, so one vector of V feeds eight products; neighbouring
// positions are paired with a byte permutation.
#pragma once

#include "cuda/attention_tiles.h"
#include "cuda/attention_work.cuh"
#include "cuda/tensor_core.cuh"

namespace tide::cuda {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = kAttentionWarps * 32;
constexpr int kTilePositions = 16;
constexpr int kPageGroup = 8;  // positions that always share a page

// kDim: head_dim rounded up to 64, 96, 128 or 256. kLaneTiles: 16 lanes each.
template <int kDim, int kLaneTiles>
struct AttentionLayout {
    static constexpr int kLanes = kLaneTiles * 16;
    static constexpr int kKeyVectors = kDim / kVector;
    static constexpr int kValueBlocks = (kDim + 63) / 64;
    static constexpr int kValueVectors = kValueBlocks * 8;
    static constexpr int kKeyBytes = kTilePositions * kKeyVectors * kVectorBytes;
    static constexpr int kValueBytes = kTilePositions * kValueVectors * kVectorBytes;
    static constexpr int kStageBytes = kKeyBytes + kValueBytes;
    static constexpr int kStages = kDim <= 64 ? 4 : kDim <= 96 ? 3 : 2;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kQueryBytes = kLanes * kKeyVectors * kVectorBytes;
    static constexpr int kSharedBytes = kAttentionWarps * kWarpBytes + kQueryBytes;
    static constexpr int kSumStride = kValueBlocks * 64;  // floats; a warp's sums lie where its tiles were
    // What registers and the shared memory of sm_80 or sm_90 allow; elsewhere some CTAs just wait for their turn.
    static constexpr int kCtasPerSm = kDim > 128 ? 1 : kDim != 96 && kLaneTiles == 1 ? 3 : 2;
    static_assert(kLanes * kSumStride * 4 <= kWarpBytes, "the sums of a warp must fit its stages");
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

template <int kDim, int kLaneTiles>
struct AttentionShared {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    PieceFinder<kAttentionThreads, Layout::kLanes> finder;
    int64_t pages[kLargestChunk / kPageGroup];  // element offset of every 8 positions of the chunk, for the kv head
    float2 stats[kAttentionWarps][Layout::kLanes];
};

#if TIDE_HAS_TENSOR_CORE_PATH

// Offsets of the chunk's positions [begin, end) in the pools.
__device__ inline void find_pages(const PagedAttentionParams& p, const Piece& piece, int begin, int end,
                                  int64_t* pages) {
    const int32_t* table = p.block_tables + piece.row_index * p.max_blocks;
    const int block_size = static_cast<int>(p.block_size);
    for (int i = threadIdx.x; begin + i * kPageGroup < end; i += kAttentionThreads) {
        const int position = begin + i * kPageGroup;
        const int64_t block = table[position / block_size];
        pages[i] = ((block * p.num_kv_heads + piece.kv_head) * p.block_size + position % block_size) * p.head_dim;
    }
}

template <int kDim, int kLaneTiles>
__device__ inline void load_queries(const PagedAttentionParams& p, const Piece& piece, char* to) {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    for (int i = threadIdx.x; i < Layout::kLanes * Layout::kKeyVectors; i += kAttentionThreads) {
        const int row = i / Layout::kKeyVectors, vector = i % Layout::kKeyVectors;
        const Lane lane = lane_of(p, piece, row);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (lane.exists && vector * kVector < p.head_dim) {
            const char* q = static_cast<const char*>(p.q);
            v = *reinterpret_cast<const uint4*>(
                q + (lane.token * p.q_token_stride + lane.head * p.q_head_stride + vector * kVector) * 2);
        }
        *reinterpret_cast<uint4*>(to + key_offset<Layout::kKeyVectors>(row, vector)) = v;
    }
}

// Starts the copy of 16 positions, `first` counted from the start of the chunk; what lies past `end` becomes zero.
template <int kDim, int kLaneTiles>
__device__ inline void copy_tile(const PagedAttentionParams& p, const int64_t* pages, int first, int end, uint32_t to,
                                 int lane, uint64_t policy) {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    const int dim = static_cast<int>(p.head_dim);
    const int groups[2] = {first / kPageGroup, first + kPageGroup < end ? first / kPageGroup + 1 : first / kPageGroup};
    const int64_t page[2] = {pages[groups[0]], pages[groups[1]]};
    const char* keys = static_cast<const char*>(p.k_pool);
    const char* values = static_cast<const char*>(p.v_pool);
#pragma unroll
    for (int i = 0; i < kTilePositions * Layout::kKeyVectors / 32; ++i) {
        const int at = i * 32 + lane, position = at / Layout::kKeyVectors, vector = at % Layout::kKeyVectors;
        const int half = i / (Layout::kKeyVectors / 4);
        const bool exists = first + position < end && vector * kVector < dim;
        const int64_t offset = page[half] + (exists ? position % kPageGroup * dim + vector * kVector : 0);
        copy_async_or_zero(to + key_offset<Layout::kKeyVectors>(position, vector), keys + offset * 2, exists, policy);
    }
#pragma unroll
    for (int i = 0; i < kTilePositions * Layout::kValueVectors / 32; ++i) {
        const int at = i * 32 + lane, position = at / Layout::kValueVectors, vector = at % Layout::kValueVectors;
        const int half = i / (Layout::kValueVectors / 4);
        const bool exists = first + position < end && vector * kVector < dim;
        const int64_t offset = page[half] + (exists ? position % kPageGroup * dim + vector * kVector : 0);
        copy_async_or_zero(to + Layout::kKeyBytes + value_offset<Layout::kValueVectors>(position, vector),
                           values + offset * 2, exists, policy);
    }
}

// One warp's online softmax over its tiles. Index [2 * m + r]: lane 16 m + 8 r + g.
template <typename T, int kDim, int kLaneTiles>
struct WarpState {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    float sums[kLaneTiles][Layout::kValueBlocks][8][4] = {};
    float peaks[2 * kLaneTiles];
    float totals[2 * kLaneTiles] = {};  // of this thread's positions only

    __device__ WarpState() {
#pragma unroll
        for (float& peak : peaks) peak = kNothing;
    }

    // `queries` and `tile` are shared addresses. `masked`: some lane does not see all of the 16 positions from
    // `first` on.
    __device__ void see(uint32_t queries, uint32_t tile, const ScoreScale& scale, bool masked, int first,
                        const Span (&spans)[2 * kLaneTiles], int g, int t) {
        float scores[kLaneTiles][2][4] = {};
#pragma unroll(kDim > 128 ? 2 : kDim / 32)  // wide heads have no registers left for addresses
        for (int j = 0; j < kDim / 32; ++j) {
            uint4 key[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                key[n] = load_shared(tile + key_offset<Layout::kKeyVectors>(n * 8 + g, j * 4 + t));
#pragma unroll
            for (int m = 0; m < kLaneTiles; ++m) {
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
        uint32_t weights[kLaneTiles][4];
        bool grew = false;
        float shrink[2 * kLaneTiles];
#pragma unroll
        for (int m = 0; m < kLaneTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 2 * m + r;
                float v[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    v[i] = scale(scores[m][i / 2][r * 2 + i % 2]);
                    const int position = first + i / 2 * 8 + t * 2 + i % 2;
                    if (masked && (position < spans[row].low || position >= spans[row].high)) v[i] = kNothing;
                }
                float peak = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
                peak = fmaxf(peak, peaks[row]);
                const float base = base_of(peak);
                shrink[row] = exp2_fast(peaks[row] - base);
                grew |= peak != peaks[row];
                peaks[row] = peak;
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = exp2_fast(v[i] - base);
                totals[row] = totals[row] * shrink[row] + ((v[0] + v[1]) + (v[2] + v[3]));
                weights[m][r] = pack(v[0], v[1], T{});
                weights[m][2 + r] = pack(v[2], v[3], T{});
            }
        }
        if (__any_sync(~0u, grew)) {  // else all factors are one
#pragma unroll
            for (int m = 0; m < kLaneTiles; ++m) {
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
                for (int m = 0; m < kLaneTiles; ++m)
                    multiply_tile(sums[m][b][j], weights[m][0], weights[m][1], weights[m][2], weights[m][3], b0, b1,
                                  T{});
            }
        }
    }

    // To shared memory: sums [lane][dim] and stats [lane]. All lanes of the warp have read their tiles before.
    __device__ void leave(float* to, float2* stats, int g, int t) {
#pragma unroll
        for (int row = 0; row < 2 * kLaneTiles; ++row) {
            float total = totals[row];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int lane = row * 8 + g;
            if (t == 0) stats[lane] = make_float2(peaks[row], total);
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

// Adds the warps' results in order and stores them: whole ones to `out`, others to the workspace.
template <typename T, int kDim, int kLaneTiles>
__device__ inline void store_piece(const PagedAttentionParams& p, const Piece& piece, const char* warp_sums,
                                   const float2 (*stats)[AttentionLayout<kDim, kLaneTiles>::kLanes]) {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    const Partials to = partials(p);
    const int vectors = static_cast<int>(p.head_dim) / 4;
    for (int i = threadIdx.x; i < Layout::kLanes * vectors; i += kAttentionThreads) {
        const int row = i / vectors, dim = i % vectors * 4;
        const Lane lane = lane_of(p, piece, row);
        const Target target = target_of(p, lane, piece.chunk, to.chunks);
        if (!target.needed) continue;
        float peak = kNothing;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) peak = fmaxf(peak, stats[w][row].x);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) {
            const float factor = exp2_fast(stats[w][row].x - base_of(peak));
            const float4 v = *reinterpret_cast<const float4*>(warp_sums + w * Layout::kWarpBytes +
                                                              sum_index<Layout::kSumStride>(row, dim) * 4);
            sum.x = fmaf(v.x, factor, sum.x);
            sum.y = fmaf(v.y, factor, sum.y);
            sum.z = fmaf(v.z, factor, sum.z);
            sum.w = fmaf(v.w, factor, sum.w);
            total = fmaf(stats[w][row].y, factor, total);
        }
        if (target.whole) {
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            const uint2 packed =
                make_uint2(pack(sum.x * inverse, sum.y * inverse, T{}), pack(sum.z * inverse, sum.w * inverse, T{}));
            *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + target.out + dim) = packed;
        } else {
            *reinterpret_cast<float4*>(to.sums + target.partial * p.head_dim + dim) = sum;
            if (dim == 0) to.stats[target.partial] = make_float2(peak, total);
        }
    }
}

#endif

template <typename T, int kDim, int kLaneTiles>
__global__ void __launch_bounds__(kAttentionThreads, (AttentionLayout<kDim, kLaneTiles>::kCtasPerSm))
    attention_tiles(const __grid_constant__ PagedAttentionParams p) {
#if TIDE_HAS_TENSOR_CORE_PATH
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    constexpr int kStages = Layout::kStages;
    extern __shared__ __align__(16) char tiles[];
    __shared__ AttentionShared<kDim, kLaneTiles> shared;
    char* query_rows = tiles + kAttentionWarps * Layout::kWarpBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t mine = shared_address(tiles) + warp * Layout::kWarpBytes;
    const uint32_t queries = shared_address(query_rows);
    const ScoreScale scale(p);
    let_next_start();
    wait_for_previous();
    const uint64_t policy = read_once_policy();
    shared.finder.count(p);
    for (int64_t index = blockIdx.x; index < shared.finder.total(); index += gridDim.x) {
        const Piece& piece = shared.finder.find(p, index);
        const int begin = chunk_begin(piece.chunk);
        const int end = min(chunk_begin(piece.chunk + 1), piece.row.length);
        find_pages(p, piece, begin, end, shared.pages);
        load_queries<kDim, kLaneTiles>(p, piece, query_rows);

        // Which positions the lanes see; lanes that do not exist see all and are thrown away.
        Span spans[2 * kLaneTiles];
        int all_from = 0, all_upto = end, any_from = end;
#pragma unroll
        for (int r = 0; r < 2 * kLaneTiles; ++r) {
            const Lane l = lane_of(p, piece, r * 8 + g);
            spans[r] = l.exists ? l.span : Span{0, INT32_MAX};
            all_from = max(all_from, spans[r].low);
            all_upto = min(all_upto, spans[r].high);
            if (l.exists) any_from = min(any_from, l.span.low);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
            all_from = max(all_from, __shfl_xor_sync(~0u, all_from, step));
            all_upto = min(all_upto, __shfl_xor_sync(~0u, all_upto, step));
            any_from = min(any_from, __shfl_xor_sync(~0u, any_from, step));
        }
        __syncthreads();  // pages and queries are there

        // This warp's tiles: every fourth, without those that lie before all windows.
        const int num_tiles = (end - begin + kTilePositions - 1) / kTilePositions;
        const int skipped = max(any_from - begin, 0) / kTilePositions;
        const int first_turn = max(skipped - warp + kAttentionWarps - 1, 0) / kAttentionWarps;
        const int first_tile = warp + first_turn * kAttentionWarps;
        const int count = max(num_tiles - first_tile + kAttentionWarps - 1, 0) / kAttentionWarps;
        auto copy = [&](int turn, int slot) {
            const int first = (first_tile + turn * kAttentionWarps) * kTilePositions;
            copy_tile<kDim, kLaneTiles>(p, shared.pages, first, end - begin, mine + slot * Layout::kStageBytes, lane,
                                        policy);
        };
#pragma unroll 1
        for (int s = 0; s < kStages; ++s) {
            if (s < count) copy(s, s);
            close_copy_group();
        }
        WarpState<T, kDim, kLaneTiles> state;
        int slot = 0;
        for (int turn = 0; turn < count; ++turn) {
            wait_copy_groups<kStages - 1>();
            __syncwarp();  // the other lanes' copies have arrived too
            const int first = begin + (first_tile + turn * kAttentionWarps) * kTilePositions;
            const bool masked = first < all_from || first + kTilePositions > all_upto;
            state.see(queries, mine + slot * Layout::kStageBytes, scale, masked, first, spans, g, t);
            __syncwarp();  // all lanes have read the tile before it is filled again
            if (turn + kStages < count) copy(turn + kStages, slot);
            close_copy_group();
            slot = slot + 1 == kStages ? 0 : slot + 1;
        }
        state.leave(reinterpret_cast<float*>(tiles + warp * Layout::kWarpBytes), shared.stats[warp], g, t);
        __syncthreads();
        store_piece<T, kDim, kLaneTiles>(p, piece, tiles, shared.stats);
        __syncthreads();  // before the next piece writes to shared memory
    }
#endif
}

template <typename T, int kDim, int kLaneTiles>
bool launch_attention(const PagedAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    using Layout = AttentionLayout<kDim, kLaneTiles>;
    int most_shared = 0;
    check("paged_attention", cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id));
    const int64_t needed = Layout::kSharedBytes + static_cast<int64_t>(sizeof(AttentionShared<kDim, kLaneTiles>));
    if (needed > most_shared) return false;
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t lane_groups = (p.num_tokens * group + Layout::kLanes - 1) / Layout::kLanes + p.rows;
    const int64_t most_pieces = lane_groups * p.num_kv_heads * num_chunks(p.max_context);
    const int64_t resident = int64_t{device.num_sms} * Layout::kCtasPerSm;
    const LaunchShape shape = {most_pieces < resident ? most_pieces : resident, kAttentionThreads,
                               Layout::kSharedBytes};
    launch("paged_attention", attention_tiles<T, kDim, kLaneTiles>, shape, stream, p);
    return true;
}

template <typename T, int kDim>
bool launch_lane_tiles(const PagedAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    // Two lane tiles of the widest heads would not fit the registers.
    if constexpr (kDim <= 128) {
        if (p.max_queries * (p.num_heads / p.num_kv_heads) > 16) return launch_attention<T, kDim, 2>(p, device, stream);
    }
    return launch_attention<T, kDim, 1>(p, device, stream);
}

template <typename T>
bool launch_attention_tiles(const PagedAttentionParams& p, cudaStream_t stream) {
    const DeviceInfo device = current_device("paged_attention");
    if (p.head_dim <= 64) return launch_lane_tiles<T, 64>(p, device, stream);
    if (p.head_dim <= 96) return launch_lane_tiles<T, 96>(p, device, stream);
    if (p.head_dim <= 128) return launch_lane_tiles<T, 128>(p, device, stream);
    return launch_lane_tiles<T, 256>(p, device, stream);
}

}  // namespace tide::cuda
