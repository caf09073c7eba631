// The launches of the linear's kernels. T is __half or __nv_bfloat16. in_features, x_stride and the pointers must be
// multiples of 16 bytes.
#pragma once

#include <type_traits>

#include "cuda/linear/choice.h"

namespace tide::cuda {

// One of kLinearTiles that has_kernel(). kNormed: there is a norm; for __nv_bfloat16 only, as are E4M3 weights
// (Fp8LinearParams).
template <typename T, bool kNormed, typename Params>
void launch_linear_tiles(const Params& params, const LinearTile& tile, cudaStream_t stream);

// One of kWideLinearTiles that has_wide_kernel().
template <typename T, typename Params>
void launch_linear_wide(const Params& params, const WideTile& tile, cudaStream_t stream);

// One of kThinTiles.
template <typename T, typename Params>
void launch_linear_thin(const Params& params, const ThinTile& tile, cudaStream_t stream);

template <typename Params>
constexpr bool kIsFp8 = std::is_base_of_v<Fp8LinearParams, Params>;
template <typename Params>
constexpr bool kIsDealt = std::is_same_v<Params, DealtFp8LinearParams>;

}  // namespace tide::cuda
