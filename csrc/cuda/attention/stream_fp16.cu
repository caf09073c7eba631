#include "cuda/attention/stream.cuh"

namespace tide::cuda {

template void launch_attention_stream<__half>(const PagedAttentionParams&, const RotaryWriteParams*, bool&,
                                              cudaStream_t);

}  // namespace tide::cuda
