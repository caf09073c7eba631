// Ways to run a linear of E4M3 weights, by name. Each gives the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "cuda/linear/linear.h"

namespace tide::cuda::bench {

template <typename Params>
struct Variant {
    std::string name;
    int tokens;  // rows of x for each time that the weight is read
    std::function<void(const Params&, cudaStream_t)> run;
};

template <typename Params>
using Variants = std::vector<Variant<Params>>;

// Of linear_thin with so many tokens, and of linear_staged with tiles that are not among kLinearTiles.
template <int kTokens, typename Params>
void add_thin(Variants<Params>& variants);
template <typename Params>
void add_staged(Variants<Params>& variants);

}  // namespace tide::cuda::bench
