#include "cuda/linear/wide_stay.cuh"

namespace tide::cuda {

template void launch_linear_wide<__half>(const LinearParams&, const WideTile&, cudaStream_t);

}  // namespace tide::cuda
