#include "cuda/attention/tiles.cuh"

namespace tide::cuda {

template bool launch_attention_tiles<__half>(const PagedAttentionParams&, bool&, cudaStream_t);

}  // namespace tide::cuda
