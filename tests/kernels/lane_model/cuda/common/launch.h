// In place of the real one: a launch runs its clusters one after another.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/common/limits.h"
#include "lanes.h"

namespace tide::cuda {

enum class Effect { kWrites, kNone, kPublishes, kWeights };

struct DeviceInfo {
    int id, arch;
    bool sm90a;
    int num_sms, shared_bytes, shared_bytes_per_sm, reserved_shared_bytes;
};
inline DeviceInfo current_device(const char*) {
    return {0, 90, false, 132, kSharedOfCta90, 233472, 1024};
}

struct LaunchShape {
    int64_t grid;
    int block;
    int64_t shared_bytes = 0;
    int cluster = 1;
    Effect effect = Effect::kWrites;
};

template <typename... Formal, typename... Actual>
void launch(const char*, void (*kernel)(Formal...), const LaunchShape& shape, cudaStream_t, Actual&&... args) {
    if (shape.shared_bytes > kSharedOfCta90) throw std::runtime_error("too much shared memory");
    if (shape.grid % shape.cluster) throw std::runtime_error("a grid of whole clusters");
    run_grid(shape.grid, shape.block, shape.cluster, shape.shared_bytes, [&] { kernel(args...); });
}

inline void refuse_architecture() {
    std::abort();
}
inline void wait_for_previous() {}
inline void let_next_start() {}

}  // namespace tide::cuda
