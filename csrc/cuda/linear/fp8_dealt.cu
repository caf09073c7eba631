#include "cuda/linear/tiles.cuh"

namespace tide::cuda {

template void launch_linear_tiles<__nv_bfloat16, false>(const DealtFp8LinearParams&, const LinearTile&, cudaStream_t);

}  // namespace tide::cuda
