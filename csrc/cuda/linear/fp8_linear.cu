// Linears of weights in E4M3, and the matrix that they multiply with.
#include "cuda/linear/kernels.h"
#include "cuda/linear/widen.cuh"

namespace tide::cuda {
namespace {

bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

void check_fp8(const char* op, const Fp8LinearParams& p) {
    const bool blocks = p.block_rows > 0 && p.scale_shift >= 6 && p.scale_shift <= kWholeRows;
    if (p.in_features % kFp8Vector || !is_aligned(p.weight) || p.scales == nullptr || !blocks)
        throw std::runtime_error(std::string(op) + ": the kernels cannot read this weight");
}

template <typename Params>
void launch_fp8(const Params& params, const DeviceInfo& device, cudaStream_t stream) {
    const Fp8Kernel kernel = choose_fp8_kernel(params, device);
    if (kernel == Fp8Kernel::kThin)
        return launch_linear_thin<__nv_bfloat16>(params, choose_thin_tile(params, device), stream);
    if (kernel == Fp8Kernel::kWide)
        return launch_linear_wide<__nv_bfloat16>(params, choose_wide_tile(params, device), stream);
    const LinearTile tile = choose_fp8_tile(params, device);
    if (params.norm) return launch_linear_tiles<__nv_bfloat16, true>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16, false>(params, tile, stream);
}

}  // namespace

bool reads_fp8() {
    return current_device("reads_fp8").arch >= kTensorCoreArch;
}

void fp8_linear(const Fp8LinearParams& params, bool dealt, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    check_fp8("fp8_linear", params);
    if (params.x_stride % 8 || !is_aligned(params.x) || !is_aligned(params.norm))
        throw std::runtime_error("fp8_linear: x and norm are not in whole vectors");
    const DeviceInfo device = current_device("fp8_linear");
    if (device.arch < kTensorCoreArch) throw std::runtime_error("fp8_linear: needs compute capability 8.0");
    if (dealt) return launch_fp8(DealtFp8LinearParams{params}, device, stream);
    launch_fp8(params, device, stream);
}

void widen_fp8(const Fp8LinearParams& params, bool dealt, cudaStream_t stream) {
    if (params.in_features <= 0 || params.out_features <= 0) return;
    check_fp8("widen_fp8", params);
    if (!is_aligned(params.y)) throw std::runtime_error("widen_fp8: y is not in whole vectors");
    launch_widen_fp8(params, dealt, stream);
}

}  // namespace tide::cuda
