#include "cuda/bench/wide/add_variant.cuh"

namespace tide::cuda::bench {

void add_same_x(Variants& variants) {
    add_variant<3, 64, 1, 1, 2>(variants);
    add_variant<3, 128, 1, 1, 2>(variants);
    add_variant<2, 128, 1, 1, 2>(variants);
    add_variant<2, 64, 1, 2, 2>(variants);
    add_variant<2, 128, 1, 2, 2>(variants);
}

}  // namespace tide::cuda::bench
