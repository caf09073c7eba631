// The launch of the wide attention, for many lanes a piece, which 9.0 alone has.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace tide::cuda {

// As launch_attention_stream() with queries in place, for contexts up to kFirstLong, and with the same bits.
template <typename T>
void launch_attention_wide(const PagedAttentionParams& params, bool& combined, cudaStream_t stream);

}  // namespace tide::cuda
