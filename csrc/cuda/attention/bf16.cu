#include "cuda/attention/tiles.cuh"

namespace tide::cuda {

template bool launch_attention_tiles<__nv_bfloat16>(const PagedAttentionParams&, bool&, cudaStream_t);

}  // namespace tide::cuda
