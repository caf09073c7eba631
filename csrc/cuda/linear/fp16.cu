#include "cuda/linear/tiles.cuh"

namespace tide::cuda {

template void launch_linear_tiles<__half, false>(const LinearParams&, const LinearTile&, cudaStream_t);

}  // namespace tide::cuda
