#include "cuda/bench/wide/add_way.cuh"

namespace tide::cuda::bench {

namespace {

struct LongRuns : WideLayout<3, 128, 1> {
    static constexpr int kRun = 256;
};

}  // namespace

void add_alone(WideWays& ways) {
    add_way<3, 32, 1>(ways);
    add_way<3, 64, 1>(ways);
    add_way<3, 128, 1>(ways);
    add_layout<LongRuns>(ways);
}

}  // namespace tide::cuda::bench
