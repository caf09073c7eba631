// Paged attention of many query heads on sm_90a: warpgroup products over tiles that the copy engine fetches.
//
// Two consumer warpgroups take a chunk's tiles in turn and meet at its end. Three producer warps fetch keys, values and
// queries (wide_ring.cuh) and never wait for that: memory is busy while a piece is added up and stored. One
// CTA a multiprocessor, and a ring of nearly all of its memory. Where it may, a CTA fills its ring before the kernels
// before it have ended: after another attention, or a rotary_write, that takes the place of the first wait for
// memory.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/wide_ring.cuh"

namespace tide::cuda {

// The warpgroups meet an even number of times in a piece; `time` is how often they have in this one.
template <typename Layout>
__device__ inline void warpgroups_sync(const WideShared<Layout>& shared, int time) {
    const uint32_t sync_barrier = shared_address(&shared.sync_barrier);
    arrive_at(sync_barrier);
    wait_bytes(sync_barrier, time % 2);
}

template <typename Layout>
__device__ inline void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup), "n"(kWarpgroupThreads) : "memory");
}

// Whether it is so for any thread of the warpgroup. All of them request.
template <typename Layout>
__device__ inline bool any_of_warpgroup(int warpgroup, bool is_so) {
    uint32_t any;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; bar.red.or.pred p, %2, %3, p; selp.u32 %0, 1, 0, p; }"
                 : "=r"(any)
                 : "r"(static_cast<uint32_t>(is_so)), "r"(2 + warpgroup), "n"(kWarpgroupThreads)
                 : "memory");
    return __shfl_sync(~0u, any, 0) != 0;
}

// Values past the end of the piece become zeros, with which anything may be multiplied. `page`: of the tile, where the
// end is; `from`: position of that page. All threads of a warpgroup.
template <typename Layout>
__device__ inline void clear_values(char* page, int from, int end, int warpgroup) {
    constexpr int kVectors = Layout::kDim / kVector;
    for (int v = threadIdx.x % kWarpgroupThreads; v < kTilePositions * kVectors; v += kWarpgroupThreads) {
        if (from + v / kVectors < end) continue;
        *reinterpret_cast<uint4*>(page + eights_offset(Layout::kLines, v / kVectors, v % kVectors)) =
            make_uint4(0, 0, 0, 0);
    }
    order_before_copies();
    warpgroup_sync<Layout>(warpgroup);
}

// Four words of each of four neighbouring threads: word k of thread t changes places with word t of thread k.
__device__ inline void transpose_words(uint32_t (&v)[4], int t) {
    const bool odd = t & 1, high = t & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    v[0] = odd ? a : v[0];
    v[1] = odd ? v[1] : a;
    v[2] = odd ? b : v[2];
    v[3] = odd ? v[3] : b;
    a = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
    b = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    v[0] = high ? a : v[0];
    v[1] = high ? b : v[1];
    v[2] = high ? v[2] : a;
    v[3] = high ? v[3] : b;
}

// Adds up what the warpgroups have of a query head and stores it. `mine` and `other`: this warpgroup's sums and the
// other's from `dim` on, dims 2t and 2t + 1 of each 8. All threads of a warp.
template <typename T, int kFours>
__device__ inline void store_query_head(const AttentionWork& p, const Piece& piece, int index, const float2 (&stats)[2],
                                        const float4 (&mine)[kFours], const float4 (&other)[kFours], int warpgroup,
                                        int dim, int t) {
    const QueryHead query_head = query_head_of(p, piece, min(index, piece.num_query_heads - 1));
    const bool stored = index < piece.num_query_heads && query_head.covers(piece.chunk),
               whole = stored && query_head.is_whole();
    Merger both;
    both.max_score = stats[0].x;
    both.total = stats[0].y;
    both.add(stats[1]);
    float4 sums[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) sums[i] = warpgroup == 0 ? both(mine[i], other[i]) : both(other[i], mine[i]);
    const float inverse = both.total > 0.0f ? 1.0f / both.total : 0.0f;
    T* out = static_cast<T*>(p.out) + query_head.row(p) * p.head_dim + dim;
    if (__any_sync(~0u, whole)) {
#pragma unroll
        for (int i = 0; i < kFours; i += 2) {
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                words[2 * k] = pack(sums[i + k].x * inverse, sums[i + k].y * inverse, T{});
                words[2 * k + 1] = pack(sums[i + k].z * inverse, sums[i + k].w * inverse, T{});
            }
            transpose_words(words, t);
            if (whole)
                *reinterpret_cast<uint4*>(out + (i * 2 + t) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    if (!stored || whole) return;
    const Partials to = partials(p);
    const int64_t row = query_head.row(p) * to.chunks + piece.chunk;
    if (dim == 0 && t == 0) to.stats[row] = make_float2(both.max_score, both.total);
    float* partial = to.sums + row * p.head_dim + dim + t * 2;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        *reinterpret_cast<float2*>(partial + i * 16) = make_float2(sums[i].x, sums[i].y);
        *reinterpret_cast<float2*>(partial + i * 16 + 8) = make_float2(sums[i].z, sums[i].w);
    }
}

// The results of the warpgroups become one: each adds up and stores half of the dims, and gives the other half away.
// The last piece of its query heads adds up their chunks.
template <typename T, typename Layout>
__device__ inline void finish_wide(const AttentionWork& p, const Piece& piece, const WideState<T, Layout>& state,
                                   const WidePlaces<Layout>& places, char* queries, int warpgroup, int lane) {
    constexpr int kRows = Layout::kRows, kHalf = Layout::kSums / 2, kFours = kHalf / 4;
    auto& shared = places.shared;
    const int thread = threadIdx.x % kWarpgroupThreads, t = lane % 4, first_query_head = thread / 32 * 8 + lane / 4;
    const auto four = [&](int r, int i) {
        return make_float4(state.sums[r][i], state.sums[r][i + 1], state.sums[r][i + 2], state.sums[r][i + 3]);
    };
    warpgroups_sync(shared, 0);  // the queries are not needed any more, and all have stored the piece before
    // The first warpgroup's go to where the queries were.
    float4* from_first = reinterpret_cast<float4*>(queries) + thread;
    float4* from_second = reinterpret_cast<float4*>(places.exchanged) + thread;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const int place = (r * kFours + i) * kWarpgroupThreads;
            if (warpgroup == 0) {
                from_first[place] = four(r, kHalf + i * 4);
            } else {
                from_second[place] = four(r, i * 4);
            }
        }
        if (t == 0)
            shared.stats[warpgroup][first_query_head + r * 32] = {state.mergers[r].max_score, state.mergers[r].total};
    }
    warpgroups_sync(shared, 1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (thread / 32 * 8 + r * 32 >= piece.num_query_heads) continue;
        float4 mine[kFours], other[kFours];
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            other[i] = (warpgroup == 0 ? from_second : from_first)[(r * kFours + i) * kWarpgroupThreads];
            mine[i] = warpgroup == 0 ? four(r, i * 4) : four(r, kHalf + i * 4);
        }
        const int index = first_query_head + r * 32;
        store_query_head<T, kFours>(p, piece, index, {shared.stats[0][index], shared.stats[1][index]}, mine, other,
                                    warpgroup, warpgroup * (Layout::kDim / 2), t);
    }
    if (!p.counted || piece.num_chunks <= 1) return;
    warpgroups_sync(shared, 2);
    if (threadIdx.x == 0) {
        __threadfence();  // what the others stored comes before, for they have sync_barrier
        shared.is_last = count_piece(p, piece);
    }
    warpgroups_sync(shared, 3);
    if (shared.is_last) combine_piece<T, Layout::kDim, Layout::kThreads>(p, piece);
}

// The consumer warps.
template <typename T, typename Layout>
__device__ inline void attend_pieces(const StreamWork& w, const WidePlaces<Layout>& places, int warp, int lane) {
    const AttentionWork& p = w.attention;
    auto& shared = places.shared;
    const int warpgroup = warp / 4;
    const uint32_t keys = shared_address(shared.keys), values = shared_address(shared.values),
                   free = shared_address(shared.free);
    const auto any = [&](bool is_so) { return any_of_warpgroup<Layout>(warpgroup, is_so); };
    WideSlot slot;
    wait_for_previous();  // it may still read what is written here
    let_next_start();
    for (int turn = 0;; ++turn) {
        wait_bytes(shared_address(shared.known + turn % 2), turn / 2 & 1);
        const Piece piece = shared.pieces[turn % 2];
        if (piece.num_query_heads == 0) return;
        char* queries = places.queries + turn % 2 * Layout::kQueryBytes;
        // Pages in between are seen by all query heads, as they are.
        WideTiles tiles(p, piece);
        const VisibleRange visible_range(p, piece);
        int whole_from = visible_range.end(p, piece.num_query_heads - 1) - p.visible,
            whole_upto = min(visible_range.first_end, tiles.end);
        for (int* number : {&tiles.begin, &tiles.end, &tiles.first, &tiles.upto, &whole_from, &whole_upto})
            asm volatile("" : "+r"(*number));  // made once, not for each tile

        WideState<T, Layout> state(p, piece, warp % 4, lane);
#pragma unroll 1
        for (int index = 0; index < kWideTiles; ++index) {
            const int pages = tiles.pages(index);
            if (pages <= 0) continue;
            if (index % 2 == warpgroup) {
                char* at = places.tiles + slot.at * Layout::kTileBytes;
                const int first = tiles.position(index), last = first + (pages - 1) * kWideStep;
                const HeldTile tile = {shared_address(at), pages, first,
                                       pages < kWidePages || first < whole_from || last + kTilePositions > whole_upto};
                const auto await_values = [&] { wait_bytes(values + slot.at * 8, slot.phase); };
                const auto await_keys = [&] {
                    // The other warpgroup may not have read yet what was here before: its barriers are then two phases
                    // back.
                    wait_bytes(free + slot.at * 8, slot.phase ^ 1);
                    wait_bytes(keys + slot.at * 8, slot.phase);
                    if (last + kTilePositions <= tiles.end) return;
                    await_values();
                    clear_values<Layout>(at + Layout::kPoolBytes + (pages - 1) * Layout::kPageBytes, last, tiles.end,
                                         warpgroup);
                };
                state.accumulate(w.scale, tile, shared_address(queries), warp % 4, lane, await_keys, await_values, any);
                if (lane == 0) arrive_at(free + slot.at * 8);
            }
            slot.next(w.stages);
        }
        finish_wide<T, Layout>(p, piece, state, places, queries, warpgroup, lane);
        __syncwarp();
        arrive_at(shared_address(shared.done + turn % 2));
    }
}

template <typename T, typename Layout>
__global__ void __launch_bounds__(Layout::kAllThreads, 1) attention_wide(const __grid_constant__ StreamWork w) {
    extern __shared__ __align__(1024) char memory[];
    const WidePlaces<Layout> places(memory, w.stages);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees it is one
    if (threadIdx.x == Layout::kThreads) {
        places.start_barriers(w.stages);
        fetch_map(w.keys);
        fetch_map(w.values);
    }
    __syncthreads();
    if (warp < Layout::kWarps) {
        take_registers<kAttentionConsumerRegisters>();
        attend_pieces<T, Layout>(w, places, warp, lane);
    } else {
        give_registers<kAttentionProducerRegisters>();
        const bool values = warp == Layout::kWarps + 1;
        if (warp < Layout::kWarps + 2)
            produce_tiles<Layout>(w, places, values ? w.values : w.keys,
                                  places.tiles + (values ? Layout::kPoolBytes : 0),
                                  values ? places.shared.values : places.shared.keys, !values, lane);
        if (warp == Layout::kWarps + 2) produce_queries<T, Layout>(w, places, lane);
        wait_for_previous();  // also those who had nothing to do
    }
}

template <typename T, typename Layout>
void launch_wide_heads(StreamWork& work, bool& combined, cudaStream_t stream) {
    const DeviceInfo device = current_device("paged_attention");
    AttentionWork& p = work.attention;
    const int64_t stages = (device.shared_bytes - wide_bytes<Layout>(0)) / Layout::kTileBytes;
    work.stages = static_cast<int>(stages < Layout::kMostStages ? stages : Layout::kMostStages);
    const int64_t pieces = most_pieces(p, Layout::kQueryHeads),
                  grid = pieces < device.num_sms ? pieces : device.num_sms;
    // To count a piece claims long: not where a CTA has many. More chunks are too much for the last CTA to add up:
    // another kernel does it.
    p.counted = pieces <= tuning::kMostCountedPieces * device.num_sms &&
                num_chunks(p.max_context) <= tuning::kMostCountedChunks && p.num_tokens * p.num_heads < kCounters;
    combined = p.counted;
    launch("paged_attention", attention_wide<T, Layout>,
           {grid, Layout::kAllThreads, wide_bytes<Layout>(work.stages), 1, Effect::kPublishes}, stream, work);
}

template <typename T>
void launch_attention_wide(const PagedAttentionParams& p, bool& combined, cudaStream_t stream) {
    constexpr DType kType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    StreamWork work(p);
    const EarlyReads early = StreamHistory::early_reads(stream, p.k_pool, p.queries_are_new);
    work.reads_early = early != EarlyReads::kNone;
    work.reads_old_pages = early == EarlyReads::kOldPages;
    work.keys = map_eights("paged_attention", kType, p.k_pool, pool_rows(p), p.head_dim, kTilePositions);
    work.values = map_eights("paged_attention", kType, p.v_pool, pool_rows(p), p.head_dim, kTilePositions);
    const bool many = work.attention.heads_per_kv * p.max_queries > 32;
    if (p.head_dim == 64 && many) return launch_wide_heads<T, WideHeads<64, 2>>(work, combined, stream);
    if (p.head_dim == 64) return launch_wide_heads<T, WideHeads<64, 1>>(work, combined, stream);
    if (many) return launch_wide_heads<T, WideHeads<128, 2>>(work, combined, stream);
    launch_wide_heads<T, WideHeads<128, 1>>(work, combined, stream);
}

}  // namespace tide::cuda
