#pragma once

#include "cuda/bench/wide/ways.h"
#include "cuda/linear/wide.cuh"

namespace tide::cuda::bench {

// Groups x tokens / CTAs that split the slices; w and x: CTAs that share the weight and x; long: what the next pass
// wants is read into the second-level cache.
template <typename Layout>
void add_layout(WideWays& ways) {
    std::string name = std::to_string(Layout::kWarpgroups) + "x" + std::to_string(Layout::kTokens) + "/" +
                       std::to_string(Layout::kSplit);
    if (Layout::kSameWeight > 1) name += " w" + std::to_string(Layout::kSameWeight);
    if (Layout::kSameX > 1) name += " x" + std::to_string(Layout::kSameX);
    if (Layout::kAtOnce == 1 && Layout::kRun == 256) name += " long";
    ways.push_back({name, Layout::kTokens, Layout::kSameWeight, launch_wide<__nv_bfloat16, Layout>});
}
template <int kWarpgroups, int kTokens, int kSplit, int kSameWeight = 1, int kSameX = 1>
void add_way(WideWays& ways) {
    add_layout<WideLayout<kWarpgroups, kTokens, kSplit, LinearParams, kSameWeight, kSameX>>(ways);
}

}  // namespace tide::cuda::bench
