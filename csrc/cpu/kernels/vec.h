// One vector register of float32, written with compiler vector extensions so that the same source serves
// NEON, SSE, AVX2 and AVX-512. Compiled once per instruction set; the namespace keeps the versions apart.
// Kernel files include no C++ library templates: an inline one compiled here with AVX could be the copy the
// linker keeps for everybody.
#pragma once

#include <stdint.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#define TIDE_INLINE inline __attribute__((always_inline))

namespace tide::TIDE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__aarch64__) || defined(__AVX512F__)
constexpr int kNumRegisters = 32;
#else
constexpr int kNumRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t ShortVec __attribute__((vector_size(kLanes * 2)));

// A number the compiler knows, handed to a generic lambda.
template <int kCount>
struct Count {
    static constexpr int value = kCount;
};

TIDE_INLINE Vec splat(float value) {
    return Vec{} + value;
}

template <typename To, typename From>
TIDE_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

TIDE_INLINE Vec select(IntVec mask, Vec if_true, Vec if_false) {
    return bit_cast<Vec>((mask & bit_cast<IntVec>(if_true)) | (~mask & bit_cast<IntVec>(if_false)));
}

// a * b + sum, rounded once where the instruction set can. Written out, because a compiler left to itself fuses
// in one loop and not in another (GCC 13 avoids chains of fused additions on x86), and a row's result would
// then depend on the shape of the tile it happens to be in.
TIDE_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
#if defined(__aarch64__)
    return bit_cast<Vec>(vfmaq_f32(bit_cast<float32x4_t>(sum), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
#elif defined(__AVX512F__)
    return bit_cast<Vec>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(sum)));
#elif defined(__AVX2__)
    return bit_cast<Vec>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(sum)));
#else
    return a * b + sum;
#endif
}

// The order of these additions is part of every result, so there is one for each instruction set.
TIDE_INLINE float lane_sum(Vec v) {
#if defined(__aarch64__)
    return vaddvq_f32(bit_cast<float32x4_t>(v));
#else
    float lanes[kLanes];
    __builtin_memcpy(lanes, &v, sizeof(v));
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

}  // namespace tide::TIDE_ISA
