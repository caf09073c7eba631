#include "cuda/bench/wide/add_way.cuh"

namespace tide::cuda::bench {

void add_same_weight(WideWays& ways) {
    add_way<2, 64, 1, 2>(ways);
    add_way<2, 64, 1, 4>(ways);
    add_way<2, 128, 1, 2>(ways);
    add_way<3, 64, 1, 2>(ways);
    add_way<3, 128, 1, 2>(ways);
}

}  // namespace tide::cuda::bench
