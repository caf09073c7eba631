// The choice of tile for the fast linear, and its launch. All choices give bitwise the same numbers.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/launch.h"
#include "cuda/linear/linear.h"

namespace tide::cuda {

constexpr int kSlices = 8;         // of in_features, summed apart and then added in order
constexpr int kMaxTokenTiles = 8;  // of 8 rows of x

struct LinearTile {
    int row_tiles;        // 16 weight rows each, per CTA: 1 to 4 (4 means 3 beside 8 token tiles)
    int token_tiles;      // 8 rows of x each, per CTA: 1, 2, 4 or 8
    int cluster = 1;      // CTAs that share the slices among them: 1, or 2 with as many row tiles as there can be
    bool staged = false;  // x goes through shared memory; always so with more than one token tile
    bool deep = false;    // more of it on the way, one CTA per multiprocessor: 2 or 3 row tiles or a cluster, 2 or more
                          // token tiles; means nothing elsewhere
};

// The tile that should be fastest on this device.
LinearTile choose_tile(const LinearParams& params, const DeviceInfo& device);

// T is __half or __nv_bfloat16; kNormed says that there is a norm, for __nv_bfloat16 only. in_features, x_stride and
// the pointers must be multiples of 16 bytes.
template <typename T, bool kNormed>
void launch_linear_tiles(const LinearParams& params, const LinearTile& tile, cudaStream_t stream);

}  // namespace tide::cuda
