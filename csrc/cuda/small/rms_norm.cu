// Hugging Face LlamaRMSNorm: float32 inside, rounded to the storage type, then times the weight. A CTA for each row.
#include "cuda/common/launch.h"
#include "cuda/small/norm_row.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

template <typename T>
__device__ Pack normed(Pack pack, float factor, const Pack& weights) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.at[i] = round_to<T>(pack.at[i] * factor) * weights.at[i];
    return pack;
}

// kOnePack: a row has a pack for each thread at most. It is then read once, and the weights, which come from afar, are
// fetched before the kernel that makes the rows has ended.
template <typename T, bool kOnePack>
__global__ void __launch_bounds__(kMaxNormThreads, 1) rms_norm_kernel(RmsNormParams p, bool aligned) {
    __shared__ float sums[kMaxNormThreads / kWarp];
    const T* weight = static_cast<const T*>(p.weight);
    const int64_t mine = int64_t{threadIdx.x} * kPack;
    Pack weights = {};
    let_next_start();
    if (kOnePack) weights = load_pack(weight + mine, p.width - mine, aligned);
    wait_for_previous();
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        T* y = static_cast<T*>(p.y) + row * p.y_stride;
        if (kOnePack) {
            const Pack pack = load_pack(x + mine, p.width - mine, aligned);
            const float factor = norm_factor(add_squares(0.0f, pack), p.width, p.eps, sums);
            store_pack(y + mine, normed<T>(pack, factor, weights), p.width - mine, aligned);
        } else {
            const float factor = row_norm_factor(x, p.width, aligned, p.eps, sums);
            for (int64_t at = mine; at < p.width; at += int64_t{blockDim.x} * kPack) {
                const Pack pack = load_pack(x + at, p.width - at, aligned);
                store_pack(y + at, normed<T>(pack, factor, load_pack(weight + at, p.width - at, aligned)), p.width - at,
                           aligned);
            }
        }
        __syncthreads();  // before the next row's sums
    }
}

}  // namespace

void rms_norm(DType dtype, const RmsNormParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    with_storage("rms_norm", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        const bool aligned = is_aligned(p.x, p.x_stride, sizeof(T)) && is_aligned(p.y, p.y_stride, sizeof(T)) &&
                             is_aligned(p.weight, 0, sizeof(T));
        const int threads = norm_threads(p.width);
        const auto kernel = packs_of(p.width) <= threads ? rms_norm_kernel<T, true> : rms_norm_kernel<T, false>;
        launch("rms_norm", kernel, LaunchShape{grid_of(p.rows), threads, 0, 1, Effect::kNone}, stream, p, aligned);
    });
}

}  // namespace tide::cuda
