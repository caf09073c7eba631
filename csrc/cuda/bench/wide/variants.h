// Ways to run a linear for many rows, by name. Each gives the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "cuda/linear/linear.h"

namespace tide::cuda::bench {

struct Variant {
    std::string name;
    int tokens, same_weight;  // rows of x of a CTA, and CTAs of a cluster that have others
    std::function<void(const LinearParams&, cudaStream_t)> run;
};
using Variants = std::vector<Variant>;

// Tiles that share nothing, that split the slices among more than two CTAs, and that share weights or x in a cluster.
void add_alone(Variants& variants);
void add_split(Variants& variants);
void add_same_weight(Variants& variants);
void add_same_x(Variants& variants);

}  // namespace tide::cuda::bench
