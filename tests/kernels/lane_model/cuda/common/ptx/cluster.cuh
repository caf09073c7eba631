// In place of the real one: the CTAs of a cluster of the model.
#pragma once

#include "cuda/common/ptx/bulk_copy.cuh"

namespace tide::cuda {

inline void cluster_barrier() {
    meet_in_cluster();
}
inline void store_cluster(uint32_t address, uint32_t rank, const float4& v) {
    at_shared(address, 16);
    std::memcpy(memory_of(static_cast<int>(rank), address), &v, 16);
}
inline float load_cluster(uint32_t address, uint32_t rank) {
    float v;
    at_shared(address, 4);
    std::memcpy(&v, memory_of(static_cast<int>(rank), address), 4);
    return v;
}
inline void publish_cluster(uint32_t barrier, uint32_t rank) {
    memory_of(static_cast<int>(rank), barrier);
    arrive_of(barrier_of(static_cast<int>(rank), barrier));
}
inline void wait_cluster(uint32_t barrier, uint32_t phase) {
    wait_bytes(barrier, phase);
}

}  // namespace tide::cuda
