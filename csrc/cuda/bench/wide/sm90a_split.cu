#include "cuda/bench/wide/add_variant.cuh"

namespace tide::cuda::bench {

void add_split(Variants& variants) {
    add_variant<2, 64, 3>(variants);
    add_variant<2, 128, 3>(variants);
    add_variant<2, 64, 4>(variants);
    add_variant<2, 128, 4>(variants);
}

}  // namespace tide::cuda::bench
