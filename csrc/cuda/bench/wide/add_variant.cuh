#pragma once

#include "cuda/bench/wide/variants.h"
#include "cuda/linear/wide.cuh"

namespace tide::cuda::bench {

// Groups x tokens / CTAs that split the slices, w and x: CTAs that share the weight and x.
template <int kWarpgroups, int kTokens, int kSplit, int kSameWeight = 1, int kSameX = 1>
void add_variant(Variants& variants) {
    using Layout = WideLayout<kWarpgroups, kTokens, kSplit, LinearParams, kSameWeight, kSameX>;
    std::string name = std::to_string(kWarpgroups) + "x" + std::to_string(kTokens) + "/" + std::to_string(kSplit);
    if (kSameWeight > 1) name += " w" + std::to_string(kSameWeight);
    if (kSameX > 1) name += " x" + std::to_string(kSameX);
    variants.push_back({name, kTokens, kSameWeight, launch_wide<__nv_bfloat16, Layout>});
}

}  // namespace tide::cuda::bench
