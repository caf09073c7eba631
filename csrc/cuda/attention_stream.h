// The launch of the streaming attention.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "cuda/small_params.h"

namespace tide::cuda {

constexpr int kStreamShared = 160 * 1024;  // bytes that a CTA may have there, at least
constexpr int kMostJoinedQueries = 8;      // of a row, whose keys and values are new

// T is __half or __nv_bfloat16. `rotary`, where not null, says what happens to q before and which keys and values are
// new. `combined`: the chunks will have been added up.
template <typename T>
void launch_attention_stream(const PagedAttentionParams& params, const RotaryWriteParams* rotary, bool& combined,
                             cudaStream_t stream);

}  // namespace tide::cuda
