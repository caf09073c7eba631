// The launches of the linear's kernels. T is __half or __nv_bfloat16. in_features, x_stride and the pointers must be
// multiples of 16 bytes.
#pragma once

#include "cuda/linear/choice.h"

namespace tide::cuda {

// One of kLinearTiles. kNormed: there is a norm; for __nv_bfloat16 only.
template <typename T, bool kNormed>
void launch_linear_tiles(const LinearParams& params, const LinearTile& tile, cudaStream_t stream);

template <typename T>
void launch_linear_wide(const LinearParams& params, const WideTile& tile, cudaStream_t stream);

}  // namespace tide::cuda
