// Tells whether the kernels for sm_90a run on a device (device.h).
#include "cuda/common/device.h"
#include "cuda/common/ptx/warpgroup.cuh"

namespace tide::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

const void* sm90a_probe() {
    return reinterpret_cast<const void*>(&probe_kernel);
}

}  // namespace tide::cuda
