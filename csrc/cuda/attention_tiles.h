// The launch of the tensor-core attention.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace tide::cuda {

// T is __half or __nv_bfloat16; head_dim, strides and pointers are multiples of 16 bytes. False: the device has too
// little shared memory for this head_dim, and nothing was launched. `combined`: the chunks will have been added up.
template <typename T>
bool launch_attention_tiles(const PagedAttentionParams& params, bool& combined, cudaStream_t stream);

}  // namespace tide::cuda
