// exp and tanh of a vector, to about two units in the last place. NaN stays NaN.
#pragma once

#include "cpu/kernels/simd.h"

namespace tide::TIDE_ISA {

TIDE_INLINE Vec vector_max(Vec a, Vec b) {
    return select(a > b, a, b);
}  // b where a is NaN

// The larger one; NaN where either is.
TIDE_INLINE Vec max_or_nan(Vec a, Vec b) {
#if defined(__aarch64__)
    return bit_cast<Vec>(vmaxq_f32(bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
#else
    return select((a > b) | (a != a), a, b);
#endif
}

// exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2; exp(r) by its Taylor polynomial.
TIDE_INLINE Vec vector_exp(Vec x) {
    constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low mantissa bits
    constexpr float kLowest = -87.0f, kHighest = 88.0f;
    const IntVec is_zero = x == -__builtin_inff();
    x = select(x < kLowest, splat(kLowest), x);
    x = select(x > kHighest, splat(kHighest), x);
    const Vec shifted = multiply_add(x, splat(0x1.715476p0f), splat(kRound));
    const Vec n = shifted - kRound;
    const Vec rough = multiply_add(n, splat(-0x1.62e400p-1f), x);  // ln 2 in two parts
    const Vec r = multiply_add(n, splat(-0x1.7f7d1cp-20f), rough);
    Vec p = splat(0x1.a01a02p-13f);  // 1/7!
    p = multiply_add(p, r, splat(0x1.6c16c2p-10f));
    p = multiply_add(p, r, splat(0x1.111112p-7f));
    p = multiply_add(p, r, splat(0x1.555556p-5f));
    p = multiply_add(p, r, splat(0x1.555556p-3f));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    const IntVec exponent = bit_cast<IntVec>(shifted) - bit_cast<IntVec>(splat(kRound)) + 127;
    return select(is_zero, Vec{}, p * bit_cast<Vec>(exponent << 23));
}

TIDE_INLINE Vec vector_tanh(Vec x) {
    return 1.0f - 2.0f / (vector_exp(2.0f * x) + 1.0f);
}

}  // namespace tide::TIDE_ISA
