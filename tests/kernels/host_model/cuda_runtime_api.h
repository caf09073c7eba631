// As much of the CUDA runtime as the host side of a launch uses. What the device is, what the loaded code was compiled
// for and what is captured are variables; a launch writes down its attributes.
#pragma once

#include <cstddef>
#include <map>

#define CUDART_VERSION 13000

struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct CUgraph_st;
using cudaGraph_t = CUgraph_st*;
struct CUgraphNode_st;
using cudaGraphNode_t = CUgraphNode_st*;
struct cudaGraphEdgeData;
enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrReservedSharedMemoryPerBlock,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization,
};

struct cudaFuncAttributes {
    int ptxVersion, binaryVersion;
};

struct dim3 {
    unsigned int x, y = 1, z = 1;
    explicit dim3(unsigned int x = 1) : x(x) {}
};

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned int x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned int numAttrs;
};

struct FakeCapture {
    unsigned long long id = 0;  // 0: the stream is not captured
    size_t nodes = 0;           // so far; the last of them is what the next one depends on
    cudaGraphNode_t last = nullptr;
};

struct FakeRuntime {
    int device = 0;
    std::map<const void*, int> compiled_for;  // of a probe kernel: architecture of the loaded code; none: there is none
    std::map<cudaStream_t, FakeCapture> captures;
    unsigned long long next_capture = 1;
    bool overlaps = false;  // the last launch
    unsigned int cluster = 1;

    void add_node(cudaStream_t stream) {
        FakeCapture& capture = captures[stream];
        ++capture.nodes;
        capture.last = reinterpret_cast<cudaGraphNode_t>(capture.id << 32 | capture.nodes);
    }
};

inline FakeRuntime fake;

inline cudaError_t cudaGetDevice(int* device) {
    *device = fake.device;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
    return "no kernel image";
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 132;
    return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    const auto found = fake.compiled_for.find(kernel);
    if (found == fake.compiled_for.end()) return cudaErrorNoKernelImageForDevice;
    *attributes = {found->second, 90};
    return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData**, size_t* count) {
    const FakeCapture& capture = fake.captures[stream];
    *status = capture.id == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
    *id = capture.id;
    *nodes = &capture.last;
    *count = capture.nodes > 0 ? 1 : 0;
    return cudaSuccess;
}
template <typename... Formal, typename... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*)(Formal...), Actual&&...) {
    fake.overlaps = false;
    fake.cluster = 1;
    for (unsigned int i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension) fake.cluster = attribute.val.clusterDim.x;
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) fake.overlaps = true;
    }
    if (fake.captures[config->stream].id != 0) fake.add_node(config->stream);
    return cudaSuccess;
}
