#pragma once

#include "cuda/bench/fp8/variants.h"
#include "cuda/linear/thin.cuh"

namespace tide::cuda::bench {

template <int kRowGroups, int kSliceGroups, int kCluster, int kTokens, typename Params>
void add_thin_tile(Variants<Params>& variants) {
    using Layout = ThinLayout<kRowGroups, kSliceGroups, kCluster, kTokens, Params>;
    static_assert(count_thin_sums({kRowGroups, kSliceGroups, kCluster, kTokens}) <= 128);
    for (const int kib : {72, 112, 224}) {
        const bool fits = Layout::kCtasPerSm == 1 || kib <= kThinBytes / 1024;
        if (2 * Layout::kStageBytes > kib * 1024 || Layout::kSumBytes > kWideBytes || !fits) continue;
        const std::string name = "thin " + std::to_string(kRowGroups) + "x" + std::to_string(kSliceGroups) + "/" +
                                 std::to_string(kCluster) + "x" + std::to_string(kTokens) + " " + std::to_string(kib);
        variants.push_back({name, kTokens, [kib](const Params& p, cudaStream_t stream) {
                                launch_thin<__nv_bfloat16, Layout>(p, kib * 1024, stream);
                            }});
    }
}

template <int kTokens, typename Params>
void add_thin(Variants<Params>& variants) {
    if constexpr (kTokens <= 32) add_thin_tile<2, 1, 1, kTokens>(variants);
    add_thin_tile<2, 1, 2, kTokens>(variants);
    add_thin_tile<2, 1, 4, kTokens>(variants);
    add_thin_tile<1, 2, 1, kTokens>(variants);
    add_thin_tile<1, 2, 2, kTokens>(variants);
    if constexpr (kTokens <= 16) add_thin_tile<1, 1, 1, kTokens>(variants);
    if constexpr (kTokens <= 32) add_thin_tile<1, 1, 2, kTokens>(variants);
    add_thin_tile<1, 1, 4, kTokens>(variants);
    if constexpr (kTokens <= 32) add_thin_tile<2, 2, 2, kTokens>(variants);
}

}  // namespace tide::cuda::bench
