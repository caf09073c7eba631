// The bfloat16 linear of the tile unit. Each function is an entry of TileLinear (table.h).
#pragma once

#include "cpu/kernels/params.h"

namespace tide::TIDE_ISA {

int64_t tile_packed_words(int64_t rows, int64_t in_features);
int64_t tile_pack_units(int64_t rows, int64_t in_features);
void tile_pack(const TileLinearParams& params, int64_t first, int64_t last);
int64_t tile_scratch_floats(int64_t rows, int64_t in_features, int64_t columns);
void tile_linear(const TileLinearParams& params, int64_t first, int64_t last, float* scratch);

}  // namespace tide::TIDE_ISA
