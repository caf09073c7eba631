#include "cuda/bench/fp8/variants.h"
#include "cuda/linear/staged.cuh"

namespace tide::cuda::bench {
namespace {

template <int kRowTiles, int kTokenTiles, int kCluster, bool kDeep, typename Params>
void add_staged_tile(Variants<Params>& variants) {
    using Layout = StagedLayout<kRowTiles, kTokenTiles, kCluster, kDeep, false, Params>;
    const std::string name = std::to_string(kRowTiles) + "x" + std::to_string(kTokenTiles) + "/" +
                             std::to_string(kCluster) + (kDeep ? "sd" : "s");
    variants.push_back({name, kTokenTiles * 8,
                        [](const Params& p, cudaStream_t stream) { launch_staged<__nv_bfloat16, Layout>(p, stream); }});
}

}  // namespace

template <typename Params>
void add_staged(Variants<Params>& variants) {
    add_staged_tile<2, 1, 1, true>(variants);
    add_staged_tile<3, 1, 1, true>(variants);
    add_staged_tile<4, 1, 1, true>(variants);
    add_staged_tile<1, 4, 1, false>(variants);
}
template void add_staged(Variants<Fp8LinearParams>&);
template void add_staged(Variants<DealtFp8LinearParams>&);

}  // namespace tide::cuda::bench
