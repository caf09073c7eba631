// The CUDA ops. Each one enqueues its kernels on `stream` and returns: nothing is allocated, nothing waits for the
// device, and all of it can be captured in a graph. A launch that fails throws std::runtime_error naming the op.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/params.h"
#include "cuda/small_params.h"

namespace tide::cuda {

// Any shape is right. Fast when in_features, x_stride and the pointers of x and weight are multiples of 16 bytes, for
// up to 64 rows; for any number where fast_for_many_rows() and there is no norm, and a gated y has whole 8 columns.
void linear(DType dtype, const LinearParams& params, cudaStream_t stream);

// Whether the current device has a linear for many half-width rows, with the bits of the one for few.
bool fast_for_many_rows();

// head_dim: a multiple of 8 up to 256. Half-width types need q, its strides and the pools to be 16-byte aligned for
// the fast path.
void paged_attention(DType dtype, const PagedAttentionParams& params, cudaStream_t stream);

// rotary_write, then paged_attention of its queries, with the same bits, in one launch. `rotary` has no q_out and no
// num_rows; a token that no row owns is neither read nor written. Half-width numbers, and what takes_joined() takes;
// else it throws.
void attend_joined(DType dtype, const PagedAttentionParams& params, const RotaryWriteParams& rotary,
                   cudaStream_t stream);

// Whether the current device streams such pages: heads of 64 or 128, blocks of whole 16 positions, compute capability 9
// or above and the shared memory for it. Never depends on the rows.
bool takes_joined(int64_t head_dim, int64_t block_size);

// Bytes of workspace that serve any call with at most these counts. Its first 256 KiB are counters of the calls: the
// caller clears them once, before the first call; every call leaves them cleared. Calls that share it must not overlap.
size_t paged_attention_workspace(int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t max_context);

}  // namespace tide::cuda
