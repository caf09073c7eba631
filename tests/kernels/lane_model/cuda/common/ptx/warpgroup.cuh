// In place of the real one: products of four warps on the model, at once.
#pragma once

#include "cuda/common/ptx/bulk_copy.cuh"

namespace tide::cuda {

template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}
template <int kBarrier, int kThreads>
void meet_at() {
    meet_in_cta(kBarrier, kThreads);
}
inline uint64_t lines_at(uint32_t address) {
    return address >> 4;
}
constexpr uint64_t kNextColumns = 16 * 2 / 16;
inline void begin_products() {}
inline void close_products() {}
template <int kOpen>
void wait_products() {}
template <int kCount>
void pin_registers(float (&)[kCount]) {}
template <int kCount>
void pin_registers(uint4 (&)[kCount]) {}

// Number k of 16 in row `row` of lines.
inline float number_of_lines(uint64_t lines, int row, int k) {
    const uint32_t straight = static_cast<uint32_t>(lines << 4) + row * kLineBytes + k * 2;
    uint16_t bits;
    std::memcpy(&bits, at_shared(straight ^ (straight >> 7 & 7) << 4, 2), 2);
    return half_of(bits, 0);
}

template <int kCount>
void multiply_lines(float (&c)[kCount], uint64_t a, uint64_t b, __nv_bfloat16) {
    const int warp = machine.current % machine.threads / 32 % 4, lane = machine.current % 32, g = lane / 4,
              t = lane % 4;
    for (int i = 0; i < kCount; ++i) {
        const int row = 16 * warp + g + i / 2 % 2 * 8, token = i / 4 * 8 + 2 * t + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += number_of_lines(a, row, k) * number_of_lines(b, token, k);
        c[i] += sum;
    }
}

template <int kCount>
void multiply_held_lines(float (&c)[kCount], const uint4& a, uint64_t b) {
    const int lane = machine.current % 32, g = lane / 4, t = lane % 4;
    const auto upper = exchanged(uint64_t{a.z} << 32 | a.x), lower = exchanged(uint64_t{a.w} << 32 | a.y);
    for (int i = 0; i < kCount; ++i) {
        const auto& rows = i / 2 % 2 ? lower : upper;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {
            const uint64_t both = rows[g * 4 + k % 8 / 2];
            const float v = half_of(static_cast<uint32_t>(k < 8 ? both : both >> 32), k % 2);
            sum += v * number_of_lines(b, i / 4 * 8 + 2 * t + i % 2, k);
        }
        c[i] += sum;
    }
}

}  // namespace tide::cuda
