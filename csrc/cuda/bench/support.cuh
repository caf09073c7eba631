// What the timings share: device memory, noise, and timed graphs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/linear.h"

namespace tide::cuda::bench {

inline void require(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::printf("{\"failed\": \"%s\"}\n", cudaGetErrorString(error));
    std::exit(2);
}

class Buffer {
  public:
    explicit Buffer(int64_t bytes) : bytes_(bytes > 0 ? bytes : 1) { require(cudaMalloc(&data_, bytes_)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(data_); }
    template <typename T = void>
    T* get() const {
        return static_cast<T*>(data_);
    }
    int64_t bytes() const { return bytes_; }

  private:
    void* data_ = nullptr;
    int64_t bytes_;
};

__host__ __device__ inline float noise(uint64_t index, uint64_t seed) {  // in [-1, 1)
    uint64_t v = (index + 1) * 0x9E3779B97F4A7C15ull ^ seed * 0xD1B54A32D192ED03ull;
    v = (v ^ v >> 29) * 0xBF58476D1CE4E5B9ull;
    v ^= v >> 32;
    return static_cast<float>(static_cast<uint32_t>(v)) * (2.0f / 4294967296.0f) - 1.0f;
}

template <typename T>
__global__ void fill_noise(T* to, int64_t count, uint64_t seed, float scale) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
        to[i] = from_float<T>(noise(i, seed) * scale);
}

template <typename T>
void fill(T* to, int64_t count, uint64_t seed, float scale) {
    if (count > 0) fill_noise<T><<<1024, 256>>>(to, count, seed, scale);
    require(cudaGetLastError());
}

// Row tiles x token tiles / CTAs of a cluster, s: x goes through shared memory, d: deep.
inline std::string name_of(const LinearTile& tile) {
    return std::to_string(tile.row_tiles) + "x" + std::to_string(tile.token_tiles) + "/" +
           std::to_string(tile.cluster) + (tile.staged || tile.token_tiles > 1 ? "s" : "") + (tile.deep ? "d" : "");
}

// Groups x tokens / CTAs that split the slices.
inline std::string name_of(const WideTile& tile) {
    return "wide " + std::to_string(tile.warpgroups) + "x" + std::to_string(tile.tokens) + "/" +
           std::to_string(tile.split) + (tile.persistent ? " persistent" : "");
}

inline std::vector<WideTile> wide_tiles(const LinearParams& p, bool fp8 = false) {
    std::vector<WideTile> tiles;
    for (const WideTile& tile : kWideLinearTiles) {
        const bool fits = !p.gated && count_stages(p.in_features, tile.tokens) >= tuning::kFewestStages;
        if (has_wide_kernel(tile, fp8) && (fits || !tile.persistent)) tiles.push_back(tile);
    }
    return tiles;
}

template <typename Params>
std::string name_of_chosen(const Params& p, const DeviceInfo& device) {
    if (!is_wide(p, device)) return name_of(choose_tile(p, device));
    return name_of(kIsFp8<Params> ? choose_wide_tile(p, device) : choose_half_wide_tile(p, device));
}

// Groups that share rows of the weight x groups that share the slices / CTAs that split them x tokens.
inline std::string name_of(const ThinTile& tile) {
    return "thin " + std::to_string(tile.row_groups) + "x" + std::to_string(tile.slice_groups) + "/" +
           std::to_string(tile.cluster) + "x" + std::to_string(tile.tokens);
}

inline std::string name_of_chosen(const Fp8LinearParams& p, const DeviceInfo& device) {
    switch (choose_fp8_kernel(p, device)) {
        case Fp8Kernel::kThin: {
            const ThinTile tile = choose_thin_tile(p, device);
            return name_of(tile) + " " + std::to_string(thin_ring_bytes(tile) / 1024);
        }
        case Fp8Kernel::kWide:
            return name_of(choose_wide_tile(p, device));
        default:
            return name_of(choose_fp8_tile(p, device));
    }
}

template <typename T>
void launch_tiles(const LinearParams& p, const LinearTile& tile, cudaStream_t stream) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (p.norm) return launch_linear_tiles<T, true>(p, tile, stream);
    }
    launch_linear_tiles<T, false>(p, tile, stream);
}

// Microseconds of one of `launches` calls of enqueue(i, stream) in a graph: the best of a few replays.
inline double time_graph(int launches, const std::function<void(int, cudaStream_t)>& enqueue) {
    cudaStream_t stream;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) enqueue(i, stream);
    require(cudaStreamEndCapture(stream, &graph));
    require(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    require(cudaEventCreate(&begin));
    require(cudaEventCreate(&end));
    float best = 1e30f;
    for (int i = 0; i < 5; ++i) {
        require(cudaEventRecord(begin, stream));
        require(cudaGraphLaunch(exec, stream));
        require(cudaEventRecord(end, stream));
        require(cudaEventSynchronize(end));
        float ms;
        require(cudaEventElapsedTime(&ms, begin, end));
        if (i > 0 && ms < best) best = ms;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return best * 1000.0 / launches;
}

constexpr double kPeakBytesPerUs = 4.1e6;  // 4.1 TB/s: what reads reach on the H200

void time_linear(const Buffer& arena);
void time_chain(const Buffer& arena);
void time_narrow(const Buffer& arena);
void time_head(const Buffer& arena);

}  // namespace tide::cuda::bench
