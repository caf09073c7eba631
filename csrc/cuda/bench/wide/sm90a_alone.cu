#include "cuda/bench/wide/add_variant.cuh"

namespace tide::cuda::bench {

void add_alone(Variants& variants) {
    add_variant<3, 64, 1>(variants);
    add_variant<3, 128, 1>(variants);
}

}  // namespace tide::cuda::bench
