// The gate of an MLP: y = silu(gate) * up, float32 inside; silu is rounded to the storage type first, as Torch does.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pack.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

constexpr int kSiluThreads = 256;
constexpr int64_t kTile = kSiluThreads * kPack;  // elements of a row that a CTA takes at a time

template <typename T>
__global__ void __launch_bounds__(kSiluThreads) silu_mul_kernel(SiluMulParams p, int64_t tiles_per_row, bool aligned) {
    let_next_start();
    wait_for_previous();
    const int64_t tiles = p.rows * tiles_per_row;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = tile / tiles_per_row;
        const int64_t at = (tile - row * tiles_per_row) * kTile + threadIdx.x * kPack;
        if (at >= p.width) continue;
        const int64_t count = p.width - at;
        Pack gate = load_pack(static_cast<const T*>(p.gate) + row * p.gate_stride + at, count, aligned);
        const Pack up = load_pack(static_cast<const T*>(p.up) + row * p.up_stride + at, count, aligned);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            gate.at[i] = round_to<T>(gate.at[i] / (1.0f + expf(-gate.at[i]))) * up.at[i];
        }
        store_pack(static_cast<T*>(p.y) + row * p.y_stride + at, gate, count, aligned);
    }
}

}  // namespace

void silu_mul(DType dtype, const SiluMulParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    const int64_t tiles_per_row = (p.width + kTile - 1) / kTile;
    with_storage("silu_mul", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        const bool aligned = is_aligned(p.gate, p.gate_stride, sizeof(T)) && is_aligned(p.up, p.up_stride, sizeof(T)) &&
                             is_aligned(p.y, p.y_stride, sizeof(T));
        launch("silu_mul", silu_mul_kernel<T>,
               LaunchShape{grid_of(p.rows * tiles_per_row), kSiluThreads, 0, 1, Effect::kNone}, stream, p,
               tiles_per_row, aligned);
    });
}

}  // namespace tide::cuda
