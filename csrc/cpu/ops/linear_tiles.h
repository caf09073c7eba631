#pragma once

#include "cpu/kernels/table.h"

namespace tide {

// The linear of ops.h, all in bfloat16, by a tile unit.
void linear_in_tiles(const TileLinear& tiles, const BFloat16* x, const BFloat16* weight, const BFloat16* bias,
                     BFloat16* y, int64_t rows, int64_t in_features, int64_t out_features);

}  // namespace tide
