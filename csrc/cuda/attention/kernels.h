// The launches of the attention kernels. T is __half or __nv_bfloat16. `combined`: the chunks will have been added up.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention/attention.h"
#include "cuda/small/ops.h"

namespace tide::cuda {

// T is __half or __nv_bfloat16; head_dim, strides and pointers are multiples of 16 bytes. False: the device has too
// little shared memory for this head_dim, and nothing was launched. `combined`: the chunks will have been added up.
template <typename T>
bool launch_attention_tiles(const PagedAttentionParams& params, bool& combined, cudaStream_t stream);

constexpr int kStreamShared = 160 * 1024;  // bytes that a CTA may have there, at least
constexpr int kMostJoinedQueries = 8;      // of a row, whose keys and values are new

// T is __half or __nv_bfloat16. `rotary`, where not null, defines what happens to q before and which keys and values
// are new. `combined`: the chunks will have been added up.
template <typename T>
void launch_attention_stream(const PagedAttentionParams& params, const RotaryWriteParams* rotary, bool& combined,
                             cudaStream_t stream);

// For many query heads a piece, on sm_90a. As launch_attention_stream() with queries in place, for contexts up to
// kFirstLong, and with the same bits.
template <typename T>
void launch_attention_wide(const PagedAttentionParams& params, bool& combined, cudaStream_t stream);

}  // namespace tide::cuda
