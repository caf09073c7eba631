// In place of the sources for sm_90a in a build that is not for compute capability 9.0: they are never chosen.
#include "cuda/attention/kernels.h"
#include "cuda/common/convert.cuh"
#include "cuda/common/device.h"
#include "cuda/linear/kernels.h"

namespace tide::cuda {

const void* sm90a_probe() {
    return nullptr;
}

template <typename T, typename Params>
void launch_linear_wide(const Params&, const WideTile&, cudaStream_t) {
    throw std::logic_error("linear: the kernels for sm_90a were not built");
}
template void launch_linear_wide<__half>(const LinearParams&, const WideTile&, cudaStream_t);
template void launch_linear_wide<__nv_bfloat16>(const LinearParams&, const WideTile&, cudaStream_t);
template void launch_linear_wide<__nv_bfloat16>(const Fp8LinearParams&, const WideTile&, cudaStream_t);
template void launch_linear_wide<__nv_bfloat16>(const DealtFp8LinearParams&, const WideTile&, cudaStream_t);

template <typename T, typename Params>
void launch_linear_thin(const Params&, const ThinTile&, cudaStream_t) {
    throw std::logic_error("fp8_linear: the kernels for sm_90a were not built");
}
template void launch_linear_thin<__nv_bfloat16>(const Fp8LinearParams&, const ThinTile&, cudaStream_t);
template void launch_linear_thin<__nv_bfloat16>(const DealtFp8LinearParams&, const ThinTile&, cudaStream_t);

template <typename T>
void launch_attention_wide(const PagedAttentionParams&, bool&, cudaStream_t) {
    throw std::logic_error("paged_attention: the kernels for sm_90a were not built");
}
template void launch_attention_wide<__half>(const PagedAttentionParams&, bool&, cudaStream_t);
template void launch_attention_wide<__nv_bfloat16>(const PagedAttentionParams&, bool&, cudaStream_t);

}  // namespace tide::cuda
