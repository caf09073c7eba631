// In place of the real one: boxes arrive at once, swizzled by their addresses.
#pragma once

#include <map>

#include "cuda/common/launch.h"
#include "cuda/common/ptx/tensor_core.cuh"

namespace tide::cuda {

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };

struct CUtensorMap {
    const char* data;
    uint64_t sizes[4], strides[4];  // strides in bytes
    uint32_t box[4], element, mask;
};

constexpr int kLineBytes = 128;
constexpr int kLineVectors = kLineBytes / kVectorBytes;
constexpr int kLineElements = kLineBytes / 2;

inline CUtensorMap map_boxes(const char*, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* data,
                             int dims, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                             int = 256) {
    if (dims != 4) std::abort();
    CUtensorMap map = {static_cast<const char*>(data),
                       {},
                       {},
                       {},
                       type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1u : 2u,
                       swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 3u : 7u};
    for (int i = 0; i < 4; ++i) {
        map.sizes[i] = sizes[i];
        map.box[i] = box[i];
        map.strides[i] = i ? strides[i - 1] : map.element;
        if (i && map.strides[i] % 16) throw std::runtime_error("strides are multiples of 16 bytes");
    }
    if (box[0] * map.element != (map.mask + 1) * 16) throw std::runtime_error("a line is as long as its swizzle");
    return map;
}
inline CUtensorMap map_boxes(const char* op, DType, const void* data, int dims, const cuuint64_t* sizes,
                             const cuuint64_t* strides, const cuuint32_t* box, int = 256) {
    return map_boxes(op, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, data, dims, sizes, strides, box);
}

struct Barrier {
    int arrivals, left;
    int64_t bytes;  // that are still awaited in this phase
    uint32_t phase;

    void settle() {
        if (left > 0 || bytes != 0) return;
        left = arrivals;
        phase ^= 1;
    }
};
inline std::map<std::pair<int, uint32_t>, Barrier> barriers;  // by CTA and address
inline Barrier& barrier_of(int cta, uint32_t address) {
    return barriers.at({cta, address});
}

inline void start_barrier(uint32_t barrier, int arrivals = 1) {
    barriers[{machine.cta(), barrier}] = {arrivals, arrivals, 0, 0};
}
inline void arrive_of(Barrier& barrier) {
    if (--barrier.left < 0) std::abort();
    barrier.settle();
}
inline void arrive_at(uint32_t barrier) {
    arrive_of(barrier_of(machine.cta(), barrier));
}
inline void show_barriers() {}
inline void expect_bytes(uint32_t barrier, int bytes) {
    barrier_of(machine.cta(), barrier).bytes += bytes;
    arrive_at(barrier);
}
inline void wait_bytes(uint32_t barrier, uint32_t phase) {
    while (barrier_of(machine.cta(), barrier).phase == phase) yield();
}
inline void fetch_map(const CUtensorMap&) {}

inline void copy_box(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, int c3, uint32_t barrier) {
    const int64_t first[] = {c0, c1, c2, c3};
    uint32_t offset = 0;
    for (uint32_t l = 0; l < map.box[3]; ++l) {
        for (uint32_t k = 0; k < map.box[2]; ++k) {
            for (uint32_t j = 0; j < map.box[1]; ++j) {
                for (uint32_t i = 0; i < map.box[0]; ++i, offset += map.element) {
                    const uint32_t places[] = {i, j, k, l};
                    bool here = true;
                    uint64_t from = 0;
                    for (int d = 0; d < 4; ++d) {
                        const int64_t at = first[d] + places[d];
                        here = here && at >= 0 && at < static_cast<int64_t>(map.sizes[d]);
                        from += at * map.strides[d];
                    }
                    const uint32_t straight = to + offset;
                    char* place =
                        static_cast<char*>(at_shared(straight ^ (straight >> 7 & map.mask) << 4, map.element));
                    std::memset(place, 0, map.element);
                    if (here) std::memcpy(place, map.data + from, map.element);
                }
            }
        }
    }
    barrier_of(machine.cta(), barrier).bytes -= offset;
    barrier_of(machine.cta(), barrier).settle();
}

}  // namespace tide::cuda
