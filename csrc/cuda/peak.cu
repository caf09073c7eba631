// How a row of logits ends: its largest number and where it stands, the one behind it, and the sum of all exponentials.
// Rows are cut into chunks at fixed places, a CTA for each, and the last CTA of a row to finish joins its chunks in
// their order: one launch fills the device even for one row of a whole vocabulary, and a row's result never depends on
// how many rows there are.
#include "cuda/block.cuh"
#include "cuda/launch.h"
#include "cuda/pack.cuh"
#include "cuda/small_ops.h"

namespace tide::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;
constexpr int64_t kChunk = kThreads * kPacks * kPack;
constexpr int32_t kNowhere = 0x7fffffff;

struct Top {
    float best;
    float second;
    int32_t index;
};

struct Partial {
    Top top;
    float sum;
};

// NaN stands above every number, so that it is seen.
__device__ bool beats(float a, float b) {
    return a > b || (isnan(a) && !isnan(b));
}

__device__ Top joined(const Top& a, const Top& b) {
    const bool first = beats(a.best, b.best) || (!beats(b.best, a.best) && a.index < b.index);
    const float beaten = first ? b.best : a.best, second = first ? a.second : b.second;
    return {first ? a.best : b.best, beats(beaten, second) ? beaten : second, first ? a.index : b.index};
}

__device__ Top warp_top(Top top) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const Top other = {__shfl_xor_sync(kAllLanes, top.best, distance),
                           __shfl_xor_sync(kAllLanes, top.second, distance),
                           __shfl_xor_sync(kAllLanes, top.index, distance)};
        top = joined(top, other);
    }
    return top;
}

__device__ Top block_top(Top top, Top* shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    top = warp_top(top);
    if (lane == 0) shared[warp] = top;
    __syncthreads();
    return warp_top(lane < kThreads / kWarp ? shared[lane] : Top{-INFINITY, -INFINITY, kNowhere});
}

// The chunk's numbers stay in registers between the search and the sum.
template <typename T>
__device__ Partial peak_of_chunk(const T* row, int64_t start, int64_t width, bool aligned) {
    __shared__ Top tops[kThreads / kWarp];
    __shared__ float sums[kThreads / kWarp];
    Pack packs[kPacks];
    Top top = {-INFINITY, -INFINITY, kNowhere};
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
        const int64_t at = start + (j * kThreads + threadIdx.x) * kPack;
        packs[j] = load_pack(row + at, width - at, aligned, -INFINITY);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const float value = packs[j].at[i];
            if (beats(value, top.best)) {
                top = {value, top.best, static_cast<int32_t>(at + i)};
            } else if (beats(value, top.second)) {
                top.second = value;
            }
        }
    }
    top = block_top(top, tops);
    const float base = top.best == -INFINITY ? 0.0f : top.best;  // -inf minus itself is no number
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum += expf(packs[j].at[i] - base);
    }
    return {top, block_sum(sum, sums)};
}

// By one warp.
__device__ void write_row(const PeakParams& p, int64_t row, const Partial* partials, int64_t chunks) {
    const int lane = threadIdx.x % kWarp;
    Top top = {-INFINITY, -INFINITY, kNowhere};
    for (int64_t chunk = lane; chunk < chunks; chunk += kWarp) top = joined(top, partials[chunk].top);
    top = warp_top(top);
    float sum = 0.0f;
    for (int64_t chunk = lane; chunk < chunks; chunk += kWarp) {
        sum += partials[chunk].sum * expf(partials[chunk].top.best - top.best);
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    p.best[row] = top.best;
    p.second[row] = top.second;
    p.index[row] = top.index == kNowhere ? 0 : top.index;  // every number is -inf
    p.sum[row] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) peak_kernel(PeakParams p, int64_t chunks, bool aligned) {
    __shared__ Partial only;
    let_next_start();
    wait_for_previous();
    const int64_t tasks = count_rows(p.num_rows, p.rows) * chunks;
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        const int64_t row = task / chunks, chunk = task - row * chunks;
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        const Partial partial = peak_of_chunk(x, chunk * kChunk, p.width, aligned);
        Partial* partials = chunks == 1 ? &only : static_cast<Partial*>(p.partials) + row * chunks;
        if (threadIdx.x == 0) partials[chunk] = partial;
        const bool last = chunks == 1 || last_to_finish(p.counters + row, static_cast<uint32_t>(chunks));
        __syncthreads();
        if (last && threadIdx.x < kWarp) write_row(p, row, partials, chunks);
        __syncthreads();
    }
}

}  // namespace

int64_t peak_partials(int64_t rows, int64_t width) {
    const int64_t chunks = (width + kChunk - 1) / kChunk;
    return chunks == 1 ? 0 : rows * chunks * static_cast<int64_t>(sizeof(Partial));
}

void peak(DType dtype, const PeakParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    const int64_t chunks = (p.width + kChunk - 1) / kChunk;
    with_storage("peak", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("peak", peak_kernel<T>, LaunchShape{grid_of(p.rows * chunks), kThreads}, stream, p, chunks,
               is_aligned(p.x, p.x_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
