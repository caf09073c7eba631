#include "cuda/linear/thin.cuh"

namespace tide::cuda {

template void launch_linear_thin<__nv_bfloat16>(const DealtFp8LinearParams&, const ThinTile&, cudaStream_t);

}  // namespace tide::cuda
