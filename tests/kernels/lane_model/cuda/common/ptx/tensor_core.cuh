// In place of the real one: the same instructions on the model. A copy arrives when its group is waited for.
#pragma once

#include "cuda/common/convert.cuh"
#include "lanes.h"

#define TIDE_HAS_TENSOR_CORE_PATH 1

namespace tide::cuda {

constexpr int kVectorBytes = 16;
constexpr int kVector = 8;

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared);
}
inline int same_in_warp(int v) {
    return v;
}
inline void* at_shared(uint32_t address, size_t bytes) {
    if (address % bytes || address + bytes > sizeof(shared)) std::abort();
    return shared + address;
}
inline void add_copy(uint32_t to, const void* from, int count, bool valid) {
    Copy copy = {to, {}, count};
    if (valid) std::memcpy(copy.bytes, from, count);
    at_shared(to, count);
    machine.lanes[machine.current]->groups.back().push_back(copy);
}
inline void copy_async(uint32_t to, const void* from) {
    add_copy(to, from, 16, true);
}
inline void copy_async_128(uint32_t to, const void* from) {
    add_copy(to, from, 16, true);
}
inline void copy_async_float(uint32_t to, const float* from) {
    add_copy(to, from, 4, true);
}
inline void copy_async_or_zero(uint32_t to, const void* from, bool valid) {
    add_copy(to, from, 16, valid);
}
inline void close_copy_group() {
    machine.lanes[machine.current]->groups.emplace_back();
}
template <int kOpen>
void wait_copy_groups() {
    auto& groups = machine.lanes[machine.current]->groups;
    const int closed = static_cast<int>(groups.size()) - 1;
    for (int i = 0; i < closed - kOpen; ++i) {
        for (const Copy& copy : groups[i]) std::memcpy(shared + copy.to, copy.bytes, copy.count);
    }
    groups.erase(groups.begin(), groups.begin() + std::max(0, closed - kOpen));
}
inline uint4 load_shared(uint32_t from) {
    uint4 v;
    std::memcpy(&v, at_shared(from, 16), 16);
    return v;
}
inline float load_weight_float(const float* from) {
    return *from;
}
inline float load_shared_float(uint32_t from) {
    float v;
    std::memcpy(&v, at_shared(from, 4), 4);
    return v;
}
inline void store_shared(uint32_t to, const uint4& v) {
    std::memcpy(at_shared(to, 16), &v, 16);
}
inline uint4 load_matrices(uint32_t from) {
    const int lane = machine.current % 32;
    at_shared(from, 16);
    const std::vector<uint32_t> named = exchanged(from);
    uint32_t found[4];
    for (int matrix = 0; matrix < 4; ++matrix)
        std::memcpy(&found[matrix], shared + named[8 * matrix + lane / 4] + lane % 4 * 4, 4);
    return {found[0], found[1], found[2], found[3]};
}

inline float half_of(uint32_t pair, int i) {
    const uint32_t bits = (pair >> 16 * i & 0xffff) << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
// Of bfloat16: a column of products is added in the order of its places.
inline void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                          __nv_bfloat16) {
    const int lane = machine.current % 32, g = lane / 4, t = lane % 4;
    const auto upper = exchanged(uint64_t{a2} << 32 | a0), lower = exchanged(uint64_t{a3} << 32 | a1);
    const auto columns = exchanged(uint64_t{b1} << 32 | b0);
    const auto place = [](const std::vector<uint64_t>& of, int row, int k) {
        const uint64_t both = of[row * 4 + k % 8 / 2];
        return half_of(static_cast<uint32_t>(k < 8 ? both : both >> 32), k % 2);
    };
    for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += place(i < 2 ? upper : lower, g, k) * place(columns, 2 * t + i % 2, k);
        c[i] += sum;
    }
}

inline uint4 load_global(const char* from, bool valid) {
    uint4 v = {0, 0, 0, 0};
    if (valid) std::memcpy(&v, from, 16);
    return v;
}

// Of row g, of which four lanes have a part each.
inline float squares_of(const uint4& x) {
    float mine = 0.0f, sum = 0.0f;
    for (const uint32_t pair : {x.x, x.y, x.z, x.w})
        mine += half_of(pair, 0) * half_of(pair, 0) + half_of(pair, 1) * half_of(pair, 1);
    const auto all = exchanged(mine);
    for (int t = 0; t < 4; ++t) sum += all[machine.current % 32 / 4 * 4 + t];
    return sum;
}

}  // namespace tide::cuda
