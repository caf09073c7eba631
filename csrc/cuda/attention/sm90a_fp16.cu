#include "cuda/attention/wide.cuh"

namespace tide::cuda {

template void launch_attention_wide<__half>(const PagedAttentionParams&, bool&, cudaStream_t);

}  // namespace tide::cuda
