#include "cuda/linear/wide_persistent.cuh"

namespace tide::cuda {

template void launch_linear_wide<__nv_bfloat16>(const DealtFp8LinearParams&, const WideTile&, cudaStream_t);

}  // namespace tide::cuda
