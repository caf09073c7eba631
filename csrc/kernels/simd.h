// One vector register of float32 and its conversions, written with compiler vector extensions so that
// the same source serves NEON, SSE, AVX2 and AVX-512. Compiled once per instruction set; the namespace
// keeps the versions apart. Kernel files include no C++ library templates: an inline one compiled here
// with AVX could be the copy the linker keeps for everybody.
#pragma once

#include <stdint.h>

#include "kernels/dtype.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__F16C__)
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

TIDE_INLINE Vec splat(float value) { return Vec{} + value; }

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

// ---- float16 <-> float32 -----------------------------------------------------------------------

#if defined(__aarch64__)
typedef __fp16 HalfVec __attribute__((vector_size(kLanes * 2)));

TIDE_INLINE Vec half_to_float(ShortVec h) { return __builtin_convertvector(bit_cast<HalfVec>(h), Vec); }
TIDE_INLINE ShortVec float_to_half(Vec v) {
    return bit_cast<ShortVec>(__builtin_convertvector(v, HalfVec));
}
#elif defined(__AVX512F__)
TIDE_INLINE Vec half_to_float(ShortVec h) {
    return bit_cast<Vec>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
}
TIDE_INLINE ShortVec float_to_half(Vec v) {
    return bit_cast<ShortVec>(_mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__) && defined(__F16C__)
TIDE_INLINE Vec half_to_float(ShortVec h) {
    return bit_cast<Vec>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
}
TIDE_INLINE ShortVec float_to_half(Vec v) {
    return bit_cast<ShortVec>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
}
#else
// Without hardware conversion: shift exponent and mantissa into place and let one multiplication
// rebias the exponent, which also normalises subnormals.
TIDE_INLINE Vec half_to_float(ShortVec h) {
    BitVec bits = __builtin_convertvector(h, BitVec);
    BitVec sign = (bits & 0x8000u) << 16;
    BitVec magnitude = (bits & 0x7fffu) << 13;
    Vec scaled = bit_cast<Vec>(magnitude) * 0x1p112f;
    BitVec special = bit_cast<BitVec>(bit_cast<IntVec>(magnitude) >= 0x7c00 << 13);
    return bit_cast<Vec>(bit_cast<BitVec>(scaled) | (special & 0x7f800000u) | sign);
}
// Adding a power of two chosen from the exponent rounds the mantissa to nearest even in hardware.
TIDE_INLINE ShortVec float_to_half(Vec v) {
    BitVec bits = bit_cast<BitVec>(v);
    BitVec sign = (bits >> 16) & 0x8000u;
    BitVec magnitude = bits & 0x7fffffffu;
    BitVec is_nan = bit_cast<BitVec>(bit_cast<IntVec>(magnitude) > 0x7f800000);
    Vec base = (bit_cast<Vec>(magnitude) * 0x1p112f) * 0x1p-110f;
    BitVec bias = (bits << 1) & 0xff000000u;
    const IntVec is_normal = (bit_cast<IntVec>(bias) < 0) | (bit_cast<IntVec>(bias) > 0x71000000);
    bias = bit_cast<BitVec>(select(is_normal, bit_cast<Vec>(bias), bit_cast<Vec>(BitVec{} + 0x71000000u)));
    base = bit_cast<Vec>((bias >> 1) + 0x07800000u) + base;
    BitVec rounded = bit_cast<BitVec>(base);
    BitVec half = ((rounded >> 13) & 0x7c00u) + (rounded & 0x0fffu);
    half = (is_nan & 0x7e00u) | (~is_nan & half) | sign;
    return __builtin_convertvector(half, ShortVec);
}
#endif

// ---- load and store ----------------------------------------------------------------------------

TIDE_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

TIDE_INLINE Vec load(const BFloat16* p) {
    ShortVec s;
    __builtin_memcpy(&s, p, sizeof(s));
    return bit_cast<Vec>(__builtin_convertvector(s, BitVec) << 16);
}

TIDE_INLINE Vec load(const Half* p) {
    ShortVec s;
    __builtin_memcpy(&s, p, sizeof(s));
    return half_to_float(s);
}

TIDE_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

TIDE_INLINE void store(BFloat16* p, Vec v) {
    BitVec bits = bit_cast<BitVec>(v);
    BitVec is_nan = bit_cast<BitVec>(v != v);
    BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    ShortVec s = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), ShortVec);
    __builtin_memcpy(p, &s, sizeof(s));
}

TIDE_INLINE void store(Half* p, Vec v) {
    ShortVec s = float_to_half(v);
    __builtin_memcpy(p, &s, sizeof(s));
}

// The first `count` (< kLanes) elements; the other lanes are zero and the memory behind is not read.
template <typename T>
TIDE_INLINE Vec load_partial(const T* p, int64_t count) {
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

template <typename T>
TIDE_INLINE void store_partial(T* p, Vec v, int64_t count) {
    T lanes[kLanes];
    store(lanes, v);
    for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// What `v` becomes when it is stored as T and read again.
template <typename T>
TIDE_INLINE Vec round_to(Vec v) {
    T lanes[kLanes];
    store(lanes, v);
    return load(lanes);
}

template <>
TIDE_INLINE Vec round_to<float>(Vec v) {
    return v;
}

template <typename T>
TIDE_INLINE float load_scalar(const T* p) {
    return load_partial(p, 1)[0];
}

// One number, rounded as the vector store rounds it.
template <typename T>
TIDE_INLINE void store_scalar(T* p, float value) {
    store_partial(p, splat(value), 1);
}

template <>
TIDE_INLINE void store_scalar<float>(float* p, float value) {
    *p = value;
}

}  // namespace tide::TIDE_ISA
