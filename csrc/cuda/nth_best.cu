// The n-th best of a row: the best, then the best of those behind it, and so on; a CTA for each row. Few are asked for:
// the first two are found in one pass over the row, each further one in another.
#include "cuda/block.cuh"
#include "cuda/branches.h"
#include "cuda/convert.cuh"
#include "cuda/launch.h"
#include "cuda/pack.cuh"

namespace tide::cuda {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kSign = 0x80000000u;

// Greater for what comes first: by number, then by lower place. Never 0.
__device__ uint64_t key_of(float value, int64_t place) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
    const uint32_t order = isnan(value) ? 0xffffffffu : bits & kSign ? ~bits : bits | kSign;
    return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(place));
}

__device__ uint64_t block_max(uint64_t value, uint64_t* shared) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
        value = other > value ? other : value;
    }
    __syncthreads();  // whoever still reads the last result
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < kThreads / kWarp; ++warp) value = shared[warp] > value ? shared[warp] : value;
    return value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) nth_best_kernel(NthBestParams p, bool aligned) {
    __shared__ uint64_t shared[kThreads / kWarp];
    let_next_start();
    wait_for_previous();
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        const int32_t last = p.ranks[row];
        uint64_t first = 0, second = 0;  // of this thread
        for (int64_t begin = int64_t{threadIdx.x} * kPack; begin < p.width; begin += kThreads * kPack) {
            const Pack pack = load_pack(x + begin, p.width - begin, aligned);
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                const uint64_t key = begin + i < p.width ? key_of(pack.at[i], begin + i) : 0;
                const uint64_t beaten = key < first ? key : first;
                second = beaten > second ? beaten : second;
                first = key > first ? key : first;
            }
        }
        uint64_t best = block_max(first, shared);
        if (last > 0) best = block_max(first == best ? second : first, shared);
        for (int32_t rank = 2; rank <= last; ++rank) {
            uint64_t mine = 0;
            for (int64_t at = threadIdx.x; at < p.width; at += kThreads) {
                const uint64_t key = key_of(to_float(x[at]), at);
                if (key < best && key > mine) mine = key;
            }
            best = block_max(mine, shared);
        }
        if (threadIdx.x == 0) p.index[row] = 0xffffffffu - static_cast<uint32_t>(best);
    }
}

}  // namespace

void nth_best(DType dtype, const NthBestParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.width <= 0) return;
    with_storage("nth_best", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("nth_best", nth_best_kernel<T>, LaunchShape{grid_of(params.rows), kThreads, 0, 1, Effect::kNothing},
               stream, params, is_aligned(params.x, params.x_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
