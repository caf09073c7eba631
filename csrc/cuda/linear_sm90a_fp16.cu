#include "cuda/linear_wide_launch.cuh"

namespace tide::cuda {

template void launch_linear_wide<__half>(const LinearParams&, const WideTile&, cudaStream_t);

}  // namespace tide::cuda
