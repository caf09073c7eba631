// Linears of weights in E4M3, and the matrix that they multiply with.
#include "cuda/common/fp8.cuh"
#include "cuda/common/launch.h"
#include "cuda/linear/fp8_stage.h"
#include "cuda/linear/kernels.h"

namespace tide::cuda {
namespace {

constexpr int kWidenThreads = 256;

// A thread widens 16 columns: the four numbers that lie together are columns 2t, 2t + 1, 2t + 8, 2t + 9.
//
// The linear that follows reads its weights early, so that it must not start early: this kernel never allows it.
__global__ void __launch_bounds__(kWidenThreads) widen_weight(const __grid_constant__ Fp8LinearParams p) {
    wait_for_previous();
    const uint32_t vectors = static_cast<uint32_t>(p.in_features) / kFp8Vector;  // of a row
    const uint32_t at = blockIdx.x * kWidenThreads + threadIdx.x, row = at / vectors;
    if (row >= p.out_features) return;
    const int column = static_cast<int>((at - row * vectors) * kFp8Vector);
    const float scale = p.scales[row / p.block_rows * p.scale_stride + (column >> p.scale_shift)];
    const uint4 raw = static_cast<const uint4*>(p.weight)[at];
    const uint2 a = widen_four(raw.x, scale), b = widen_four(raw.y, scale);
    const uint2 c = widen_four(raw.z, scale), d = widen_four(raw.w, scale);
    uint4* y = static_cast<uint4*>(p.y) + int64_t{at} * 2;
    y[0] = {a.x, b.x, c.x, d.x};
    y[1] = {a.y, b.y, c.y, d.y};
}

bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

void check_fp8(const char* op, const Fp8LinearParams& p) {
    const bool blocks = p.block_rows > 0 && p.scale_shift >= 6 && p.scale_shift <= kWholeRows;
    if (p.in_features % kFp8Vector || !is_aligned(p.weight) || p.scales == nullptr || !blocks)
        throw std::runtime_error(std::string(op) + ": the kernels cannot read this weight");
}

}  // namespace

bool reads_fp8() {
    return current_device("reads_fp8").arch >= kTensorCoreArch;
}

void fp8_linear(const Fp8LinearParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    check_fp8("fp8_linear", params);
    if (params.x_stride % 8 || !is_aligned(params.x) || !is_aligned(params.norm))
        throw std::runtime_error("fp8_linear: x and norm are not in whole vectors");
    const DeviceInfo device = current_device("fp8_linear");
    if (device.arch < kTensorCoreArch) throw std::runtime_error("fp8_linear: needs compute capability 8.0");
    if (is_wide(params, device))
        return launch_linear_wide<__nv_bfloat16>(params, choose_wide_tile(params, device), stream);
    const LinearTile tile = choose_tile(params, device);
    if (params.norm) return launch_linear_tiles<__nv_bfloat16, true>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16, false>(params, tile, stream);
}

void widen_fp8(const Fp8LinearParams& params, cudaStream_t stream) {
    if (params.in_features <= 0 || params.out_features <= 0) return;
    check_fp8("widen_fp8", params);
    if (!is_aligned(params.y)) throw std::runtime_error("widen_fp8: y is not in whole vectors");
    const int64_t vectors = params.out_features * (params.in_features / kFp8Vector);
    if (vectors >= INT32_MAX) throw std::runtime_error("widen_fp8: too many numbers for one launch");
    const int64_t grid = (vectors + kWidenThreads - 1) / kWidenThreads;
    launch("widen_fp8", widen_weight, {grid, kWidenThreads, 0, 1, Effect::kWeights}, stream, params);
}

}  // namespace tide::cuda
