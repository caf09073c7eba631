// What the host knows of a device when it chooses a kernel.
//
// The choice depends on what the loaded code was compiled for, not on what the device could run: a build for 8.0 runs
// on a 9.0 device as PTX that the driver translates, and `__CUDA_ARCH__` was 800 when it was made. Kernels for 9.0 are
// empty there. A probe kernel in each set of sources (probe.cu, probe_sm90a.cu) shows what was loaded.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <stdexcept>
#include <string>

#include "cuda/common/limits.h"

namespace tide::cuda {

inline void check(const char* op, cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
}

struct DeviceInfo {
    int id;
    int arch;    // that the loaded code was compiled for; at most the device's own
    bool sm90a;  // the kernels for sm_90a are in the build and run here
    int num_sms;
    int shared_bytes;           // of shared memory, that one CTA can have
    int shared_bytes_per_sm;    // that all CTAs of a multiprocessor have together
    int reserved_shared_bytes;  // of these, that the system reserves for each CTA
};

// Kernels that do nothing, one in each set of sources. `sm90a_probe` is null where those were not built.
const void* portable_probe();
const void* sm90a_probe();

// 0: no code in the build runs on the current device.
inline int loaded_arch(const void* probe) {
    cudaFuncAttributes attributes = {};
    if (probe == nullptr) return 0;
    if (cudaFuncGetAttributes(&attributes, probe) == cudaSuccess) return attributes.ptxVersion;
    cudaGetLastError();  // clears it
    return 0;
}

// Throws where the build has no code for the current device.
inline DeviceInfo current_device(const char* op) {
    thread_local std::map<int, DeviceInfo> known;
    int id = 0;
    check(op, cudaGetDevice(&id));
    if (const auto found = known.find(id); found != known.end()) return found->second;
    DeviceInfo device = {};
    device.id = id;
    device.arch = loaded_arch(portable_probe());
    if (device.arch == 0) throw std::runtime_error(std::string(op) + ": the CUDA module has no code for this device");
    device.sm90a = loaded_arch(sm90a_probe()) == 90;
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
        check(op, cudaDeviceGetAttribute(&value, attribute, id));
    };
    read(device.num_sms, cudaDevAttrMultiProcessorCount);
    read(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(device.shared_bytes_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(device.reserved_shared_bytes, cudaDevAttrReservedSharedMemoryPerBlock);
    return known[id] = device;
}

}  // namespace tide::cuda
