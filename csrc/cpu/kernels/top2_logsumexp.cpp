// Of a row of logits: the largest number, the second, and the sum of all exponentials.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vector_math.h"

namespace tide::TIDE_ISA {
namespace {

constexpr float kLowest = -__builtin_inff();

float lane_max(Vec v) {
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = best > v[i] || best != best ? best : v[i];
    return best;
}

int lane_count(IntVec mask) {
    int count = 0;
    for (int i = 0; i < kLanes; ++i) count -= mask[i];
    return count;
}

// The last, partial vector; its missing lanes hold what cannot win.
TIDE_INLINE Vec load_rest(const float* x, int64_t count) {
    float lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? x[i] : kLowest;
    return load(lanes);
}

}  // namespace

float maximum(const float* x, int64_t count) {
    constexpr int kChains = 4;  // so that comparisons do not wait for one another
    Vec best[kChains];
    for (Vec& chain : best) chain = splat(kLowest);
    int64_t i = 0;
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
        for (int chain = 0; chain < kChains; ++chain)
            best[chain] = max_or_nan(best[chain], load(x + i + chain * kLanes));
    }
    for (; i + kLanes <= count; i += kLanes) best[0] = max_or_nan(best[0], load(x + i));
    if (i < count) best[0] = max_or_nan(best[0], load_rest(x + i, count - i));
    return lane_max(max_or_nan(max_or_nan(best[0], best[1]), max_or_nan(best[2], best[3])));
}

Top2 top2_logsumexp(const float* x, int64_t count) {
    const float best = maximum(x, count);
    const float base = best == kLowest ? 0.0f : best;  // -inf minus itself is no number
    Vec below = splat(kLowest), sum = {};
    IntVec equal = {};
    auto see = [&](Vec v) __attribute__((always_inline)) {
        below = vector_max(select(v < best, v, splat(kLowest)), below);
        equal += v == best;
        sum += vector_exp(v - base);
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) see(load(x + i));
    if (i < count) see(load_rest(x + i, count - i));
    return {best, lane_count(equal) > 1 ? best : lane_max(below), lane_sum(sum)};
}

}  // namespace tide::TIDE_ISA
