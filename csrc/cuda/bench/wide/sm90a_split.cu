#include "cuda/bench/wide/add_way.cuh"

namespace tide::cuda::bench {

void add_split(WideWays& ways) {
    add_way<2, 32, 3>(ways);
    add_way<2, 32, 4>(ways);
    add_way<2, 64, 3>(ways);
    add_way<2, 128, 3>(ways);
    add_way<2, 64, 4>(ways);
    add_way<2, 128, 4>(ways);
}

}  // namespace tide::cuda::bench
