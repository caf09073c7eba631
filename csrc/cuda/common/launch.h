// How every kernel is launched, and how kernels that follow one another overlap (programmatic dependent launch).
//
// On sm_90 and above a kernel may start while the one before it still runs. Rules for every kernel:
//   - every thread calls wait_for_previous(), also one that has nothing to do: a grid that ended without waiting
//     would let the next grid believe that everything before it is done;
//   - before wait_for_previous() only weights are read, or what stream_history.h allows, and nothing is written;
//   - let_next_start() may come first of all, because the next kernel waits for the end of this one anyway; it comes
//     after wait_for_previous() in a kernel that publishes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/common/device.h"
#include "cuda/common/stream_history.h"

namespace tide::cuda {

struct LaunchShape {
    int64_t grid;
    int block;
    int64_t shared_bytes = 0;  // dynamic
    int cluster = 1;           // CTAs that share their memory; above 1 needs sm_90
    Effect effect = Effect::kWrites;
};

// Launches nothing for an empty grid.
template <typename... Formal, typename... Actual>
void launch(const char* op, void (*kernel)(Formal...), const LaunchShape& shape, cudaStream_t stream,
            Actual&&... args) {
    if (shape.grid <= 0) return;
    if (shape.grid > INT32_MAX) throw std::runtime_error(std::string(op) + ": too many rows for one launch");
    if (shape.shared_bytes > kSharedWithoutOptIn) {
        check(op,
              cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shape.shared_bytes)));
    }
    cudaLaunchAttribute attributes[2];
    unsigned int count = 0;
    const bool may_overlap = StreamHistory::may_overlap(stream);
    if (current_device(op).arch >= kClusterArch) {
        // A multiprocessor must run empty before it splits its memory in another way: all kernels want the same split.
        check(op, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
        if (may_overlap) {
            attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[count++].val.programmaticStreamSerializationAllowed = 1;
        }
        if (shape.cluster > 1) {
            attributes[count].id = cudaLaunchAttributeClusterDimension;
            attributes[count].val.clusterDim.x = static_cast<unsigned int>(shape.cluster);
            attributes[count].val.clusterDim.y = 1;
            attributes[count++].val.clusterDim.z = 1;
        }
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned int>(shape.grid));
    config.blockDim = dim3(static_cast<unsigned int>(shape.block));
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Actual>(args)...);
    cudaGetLastError();  // the same error again, if there was one
    check(op, error);
    StreamHistory::record(stream, shape.effect);
}

#ifdef __CUDACC__

// For what must not run in code for this architecture: the host chose a kernel that was not compiled for it.
__device__ inline void refuse_architecture() {
    __trap();
}

// Returns when all earlier kernels of the stream have ended and what they wrote can be seen.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel of the stream start its prologue once every CTA of this one has come here.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

#endif

}  // namespace tide::cuda
