// Of each row of logits: the largest number and its index, the second, and the sum of all exponentials.
// Rows are cut into chunks at fixed places, a CTA for each, and the last CTA of a row to finish joins its chunks in
// their order: one launch fills the device even for one row of a whole vocabulary, and a row's result never depends on
// how many rows there are. Numbers are compared as integers in the same order, which a warp compares in one
// instruction; each warp adds up exponentials on its own largest number, so that a CTA waits for its warps once.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/ordered.cuh"
#include "cuda/common/pack.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

constexpr int kTop2Threads = 256;
constexpr int kTop2Warps = kTop2Threads / kWarp;
constexpr int kPacks = 4;  // of a thread: what they load is outstanding together
constexpr int64_t kChunk = int64_t{kTop2Threads} * kPack * kPacks;  // a shortlist of 8192 is one, with nothing to join

__device__ float number_of(uint32_t key) {
    if (key == kMissing) return -INFINITY;
    return __uint_as_float(key & kSign ? key ^ kSign : ~key);
}

// A part of a row; 16 bytes, so that one access moves it.
struct alignas(16) Part {
    uint32_t best;
    uint32_t second;
    uint32_t index;
    float sum;  // of exp(x - best)
};

// The parts of all lanes as one, without the sum: the first of the largest, and the largest of the others.
__device__ Part warp_best(const Part& mine) {
    const uint32_t best = warp_max(mine.best);
    const uint32_t index = ~warp_max(mine.best == best ? ~mine.index : 0);
    return {best, warp_max(mine.index == index ? mine.second : mine.best), index, 0.0f};
}

// exp(value - best) where there is a number; a row of -inf has no sum before its end.
__device__ float above(float value, float best) {
    return value == -INFINITY ? 0.0f : expf(value - best);
}

__device__ Part warp_joined(const Part& mine) {
    Part all = warp_best(mine);
    const float scale = above(number_of(mine.best), number_of(all.best));
    all.sum = warp_sum(scale == 0.0f ? 0.0f : mine.sum * scale);
    return all;
}

__device__ Part joined(const Part& a, const Part& b) {
    const bool first = a.best > b.best || (a.best == b.best && a.index < b.index);
    const uint32_t best = first ? a.best : b.best, beaten = first ? b.best : a.best;
    const float scale = above(number_of(beaten), number_of(best)), more = first ? b.sum : a.sum;
    const float sum = (first ? a.sum : b.sum) + (scale == 0.0f ? 0.0f : more * scale);
    return {best, max(beaten, first ? a.second : b.second), first ? a.index : b.index, sum};
}

// Of a chunk that begins at `begin`.
template <typename T>
__device__ Part part_of_warp(const T* row, int64_t begin, int64_t width, bool aligned) {
    const auto place = [&](int pack) { return begin + (int64_t{pack} * kTop2Threads + threadIdx.x) * kPack; };
    Pack packs[kPacks];
#pragma unroll
    for (int n = 0; n < kPacks; ++n) packs[n] = load_pack(row + place(n), width - place(n), aligned);
    Part mine = {kMissing, kMissing, kNowhere, 0.0f};
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
        const int64_t at = place(n);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const uint32_t key = at + i < width ? key_of(packs[n].at[i]) : kMissing;
            mine.index = key > mine.best ? static_cast<uint32_t>(at + i) : mine.index;
            mine.second = max(mine.second, min(key, mine.best));
            mine.best = max(mine.best, key);
        }
    }
    Part all = warp_best(mine);
    const float best = number_of(all.best);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum += place(n) + i < width ? above(packs[n].at[i], best) : 0.0f;
    }
    all.sum = warp_sum(sum);
    return all;
}

// By one warp.
__device__ Part joined_chunks(const Part* parts, uint32_t chunks) {
    Part mine = {kMissing, kMissing, kNowhere, 0.0f};
    for (uint32_t chunk = threadIdx.x; chunk < chunks; chunk += kWarp) {
        const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(parts) + chunk);
        mine = joined(mine, {raw.x, raw.y, raw.z, __uint_as_float(raw.w)});
    }
    return warp_joined(mine);
}

__device__ void write_row(const Top2LogsumexpParams& p, int64_t row, const Part& all) {
    const float best = number_of(all.best);
    p.best[row] = best;
    p.second[row] = number_of(all.second);
    p.index[row] = all.index;
    p.sum[row] = isfinite(best) ? all.sum : NAN;
}

// By one warp, with the part of its own CTA; only the last CTA of a row knows the row.
__device__ void finish_row(const Top2LogsumexpParams& p, int64_t row, uint32_t chunk, uint32_t chunks, Part part) {
    if (chunks > 1) {
        Part* parts = static_cast<Part*>(p.partials) + row * chunks;
        bool last = false;
        if (threadIdx.x == 0) {
            parts[chunk] = part;
            last = count_last(p.counters + row, chunks);
        }
        if (!__shfl_sync(kAllLanes, last, 0)) return;
        __syncwarp();  // what lane 0 has seen after its fence, all lanes see
        part = joined_chunks(parts, chunks);
    }
    if (threadIdx.x == 0) write_row(p, row, part);
}

template <typename T>
__global__ void __launch_bounds__(kTop2Threads)
    top2_logsumexp_kernel(Top2LogsumexpParams p, uint32_t chunks, bool aligned) {
    __shared__ Part warps[kTop2Warps];
    wait_for_previous();
    let_next_start();  // drafts follow one another: it publishes
    const int64_t tasks = p.rows * chunks;
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        const int64_t row = task / chunks, chunk = task - row * chunks;
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        const Part mine = part_of_warp(x, chunk * kChunk, p.width, aligned);
        if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
        __syncthreads();
        if (threadIdx.x < kWarp) {
            Part part = {kMissing, kMissing, kNowhere, 0.0f};
            if (threadIdx.x < kTop2Warps) part = warps[threadIdx.x];
            finish_row(p, row, static_cast<uint32_t>(chunk), chunks, warp_joined(part));
        }
        __syncthreads();  // before the next task's warps
    }
}

}  // namespace

int64_t top2_logsumexp_partials(int64_t rows, int64_t width) {
    const int64_t chunks = (width + kChunk - 1) / kChunk;
    return chunks == 1 ? 0 : rows * chunks * static_cast<int64_t>(sizeof(Part));
}

void top2_logsumexp(DType dtype, const Top2LogsumexpParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    const int64_t chunks = (p.width + kChunk - 1) / kChunk;
    with_storage("top2_logsumexp", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("top2_logsumexp", top2_logsumexp_kernel<T>,
               LaunchShape{grid_of(p.rows * chunks), kTop2Threads, 0, 1, Effect::kPublishes}, stream, p,
               static_cast<uint32_t>(chunks), is_aligned(p.x, p.x_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
