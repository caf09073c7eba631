// Ways to run a linear for many rows, by name. Each gives the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "cuda/linear/linear.h"

namespace tide::cuda::bench {

struct WideWay {
    std::string name;
    int tokens, same_weight;  // rows of x of a CTA, and CTAs of a cluster that have others
    std::function<void(const LinearParams&, cudaStream_t)> run;
};
using WideWays = std::vector<WideWay>;

// Tiles that share nothing, that split the slices among more than two CTAs, and that share weights or x in a cluster.
void add_alone(WideWays& ways);
void add_split(WideWays& ways);
void add_same_weight(WideWays& ways);
void add_same_x(WideWays& ways);

}  // namespace tide::cuda::bench
