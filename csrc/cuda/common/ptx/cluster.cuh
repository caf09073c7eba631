// What the CTAs of a cluster do to one another's shared memory (sm_90 and above).
#pragma once

#include "cuda/common/launch.h"

namespace tide::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Waits for the other CTAs of the cluster; what any wrote to shared memory before can be seen by all after.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
    refuse_architecture();
#endif
}

// Four floats to the shared memory of CTA `rank` of the cluster, at the address it has in one's own.
__device__ inline void store_cluster(uint32_t address, uint32_t rank, const float4& v) {
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
#else
    refuse_architecture();
#endif
}

// A float of the shared memory of CTA `rank` of the cluster, at the address it has in one's own.
__device__ inline float load_cluster(uint32_t address, uint32_t rank) {
    float v = 0.0f;
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
#else
    refuse_architecture();
#endif
    return v;
}

// One more arrival at the barrier that CTA `rank` of the cluster has at that address, once what this warp wrote to that
// CTA can be seen by who waits there with wait_cluster().
__device__ inline void publish_cluster(uint32_t barrier, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
#else
    refuse_architecture();
#endif
}

// Waits for the end of a phase of one's own barrier at which other CTAs arrive.
__device__ inline void wait_cluster(uint32_t barrier, uint32_t phase) {
#if __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(phase)
            : "memory");
    }
#else
    refuse_architecture();
#endif
}

#endif

}  // namespace tide::cuda
