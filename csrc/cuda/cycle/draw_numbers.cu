// Random numbers made of the key of a stream and a step: splitmix64, as in tide_core/sampling/draw.py.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/cycle/row_meta.h"

namespace tide::cuda {
namespace {

constexpr int kNumbersThreads = 128;

// In [0, 1), with 53 random bits: the product is exact.
__device__ double uniform(uint64_t key, uint64_t step) {
    uint64_t word = key + step + 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    word ^= word >> 31;
    return static_cast<double>(static_cast<int64_t>(word >> 11)) * 0x1p-53;
}

__global__ void __launch_bounds__(kNumbersThreads) draw_numbers_kernel(DrawNumbersParams p) {
    let_next_start();
    wait_for_previous();
    const int64_t of_stream = p.distances * p.rows, count = kDrawStreams * of_stream;
    const int64_t i = int64_t{blockIdx.x} * kNumbersThreads + threadIdx.x;
    if (i >= count) return;
    const int64_t r = i % p.rows, distance = i / p.rows % p.distances, stream = i / of_stream;
    double number = 0.0;
    if (p.row_meta[kDrafts * p.rows + r] >= 0) {
        // The output tokens before this one, drafts included.
        const int64_t step = p.positions[p.starts[r]] + distance + 1 - p.row_meta[kPromptLen * p.rows + r];
        // A draft that is discarded must not show the number of a later one at its position.
        const int64_t apart = stream == kDraftStream ? distance << 32 : 0;
        number = uniform(static_cast<uint64_t>(p.keys[stream * p.rows + r]), static_cast<uint64_t>(step + apart));
    }
    p.numbers[i] = number;
}

}  // namespace

void draw_numbers(const DrawNumbersParams& params, cudaStream_t stream) {
    const int64_t count = kDrawStreams * params.distances * params.rows;
    const LaunchShape shape = {(count + kNumbersThreads - 1) / kNumbersThreads, kNumbersThreads, 0, 1, Effect::kNone};
    launch("draw_numbers", draw_numbers_kernel, shape, stream, params);
}

}  // namespace tide::cuda
