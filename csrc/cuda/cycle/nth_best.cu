// The n-th best of a row; a CTA for each row. Each draft waits for it, so it does little: the first two
// of a row are found in one pass over it, and numbers are compared as integers in the same order, which a warp compares
// in one instruction. Few ask for more: each further one takes another pass.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/ordered.cuh"
#include "cuda/common/pack.cuh"
#include "cuda/cycle/cycle.h"

namespace tide::cuda {
namespace {

constexpr int kNthThreads = 1024;  // a pack each, of a shortlist of 8192
constexpr int kNthWarps = kNthThreads / kWarp;

// A number's key and place: before another one if its key is larger, or is equal and stands at a lower place.
struct Found {
    uint32_t key, place;

    __device__ bool is_before(const Found& other) const {
        return key > other.key || (key == other.key && place < other.place);
    }
};

constexpr Found kNone = {kMissing, kNowhere};

// The first two of some numbers; 16 bytes, so that one access moves them.
struct alignas(16) FirstTwo {
    Found first = kNone, second = kNone;

    // Of numbers that come by rising places.
    __device__ void add(const Found& next) {
        const bool leads = next.key > first.key, follows = next.key > second.key;
        second = leads ? first : follows ? next : second;
        first = leads ? next : first;
    }
};

__device__ Found warp_first(const Found& mine) {
    const uint32_t key = warp_max(mine.key);
    return {key, ~warp_max(mine.key == key ? ~mine.place : 0)};
}

__device__ FirstTwo warp_first_two(const FirstTwo& mine) {
    FirstTwo all;
    all.first = warp_first(mine.first);
    all.second = warp_first(mine.first.place == all.first.place ? mine.second : mine.first);
    return all;
}

// The first of all that rank after `last`.
template <typename T>
__device__ Found first_after(const T* x, int64_t width, const Found& last) {
    Found mine = kNone;
    for (int64_t at = threadIdx.x; at < width; at += kNthThreads) {
        const Found next = {key_of(to_float(x[at])), static_cast<uint32_t>(at)};
        if (last.is_before(next) && next.key > mine.key) mine = next;
    }
    return mine;
}

template <typename T>
__global__ void __launch_bounds__(kNthThreads) nth_best_kernel(NthBestParams p, bool aligned) {
    __shared__ FirstTwo of_warps[kNthWarps];
    wait_for_previous();
    let_next_start();  // drafts follow one another: it publishes
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        const int32_t rank = p.ranks[row];
        FirstTwo mine;
        for (int64_t begin = int64_t{threadIdx.x} * kPack; begin < p.width; begin += kNthThreads * kPack) {
            const Pack pack = load_pack(x + begin, p.width - begin, aligned);
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                if (begin + i < p.width) mine.add({key_of(pack.at[i]), static_cast<uint32_t>(begin + i)});
            }
        }
        // Every warp makes the same of what all have found.
        const auto of_all = [&](const FirstTwo& found) {
            const FirstTwo of_warp = warp_first_two(found);
            if (lane == 0) of_warps[warp] = of_warp;
            __syncthreads();
            const FirstTwo all = warp_first_two(lane < kNthWarps ? of_warps[lane] : FirstTwo{});
            __syncthreads();  // before the next ones
            return all;
        };
        const FirstTwo two = of_all(mine);
        Found found = rank > 0 ? two.second : two.first;
        for (int32_t further = 1; further < rank; ++further) found = of_all({first_after(x, p.width, found)}).first;
        if (threadIdx.x == 0) p.index[row] = found.place;
    }
}

}  // namespace

void nth_best(DType dtype, const NthBestParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.width <= 0) return;
    with_storage("nth_best", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("nth_best", nth_best_kernel<T>, LaunchShape{grid_of(params.rows), kNthThreads, 0, 1, Effect::kPublishes},
               stream, params, is_aligned(params.x, params.x_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
