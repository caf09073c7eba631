// The linear for many rows on sm_90: the choice of its tile, and its launch. Bits are those of linear_tiles.h.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/launch.h"
#include "cuda/linear/linear.h"

namespace tide::cuda {

struct WideTile {
    int groups;          // of four warps, with 64 weight rows each: 1 (always split) or 2
    int tokens;          // rows of x per CTA: 32, 64 or 128 (never split)
    int split;           // CTAs that share the slices among them: 1 or 2
    bool stays = false;  // CTAs and their x, for one tile of the weight after another: {2, 32, 1} and {2, 64, 1}
};

constexpr int kWideBytes = 224 * 1024;  // of shared memory for a CTA, but for its barriers
constexpr int kFewestStages = 4;        // that keep the memory busy

// Stages of 128 weight rows, a line of 128 bytes each, that a CTA which stays has beside its x, as many lines for each
// 64 columns as it has tokens, and its sums in order.
constexpr int64_t count_stages(int64_t in_features, int tokens) {
    return (kWideBytes - (in_features + 63) / 64 * tokens * 128 - tokens * (128 + 4) * 4) / (128 * 128);
}

// Whether the kernels were built and this device runs them. They take no norm, and gated weights of whole 8 columns.
bool takes_wide(const LinearParams& params, const DeviceInfo& device);

// Whether they should be faster than the tiles for few rows.
bool is_wide(const LinearParams& params, const DeviceInfo& device);

// The tile that should be fastest on this device.
WideTile choose_wide_tile(const LinearParams& params, const DeviceInfo& device);

// T is __half or __nv_bfloat16. in_features, x_stride and the pointers must be multiples of 16 bytes.
template <typename T>
void launch_linear_wide(const LinearParams& params, const WideTile& tile, cudaStream_t stream);

}  // namespace tide::cuda
