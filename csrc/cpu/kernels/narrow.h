// Conversions between float32 and the 16-bit storage types. Compilers take __builtin_convertvector between
// vectors of different width apart into single numbers, so where there is an instruction it is named.
#pragma once

#include "cpu/kernels/vec.h"

namespace tide::TIDE_ISA {

// ---- bfloat16: the upper half of a float32 -----------------------------------------------------

TIDE_INLINE Vec bfloat16_to_float(ShortVec b) {
#if defined(__aarch64__)
    return bit_cast<Vec>(vshll_n_u16(bit_cast<uint16x4_t>(b), 16));
#elif defined(__AVX512F__)
    return bit_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(b)), 16));
#elif defined(__AVX2__)
    return bit_cast<Vec>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bit_cast<__m128i>(b)), 16));
#else
    return bit_cast<Vec>(__builtin_convertvector(b, BitVec) << 16);
#endif
}

// To nearest, ties to even; NaN to a quiet NaN, as Torch does.
TIDE_INLINE ShortVec float_to_bfloat16(Vec v) {
    const BitVec bits = bit_cast<BitVec>(v);
    const BitVec is_nan = bit_cast<BitVec>(v != v);
    const BitVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const BitVec upper = (is_nan & 0x7fc00000u) | (~is_nan & rounded);
#if defined(__aarch64__)
    return bit_cast<ShortVec>(vshrn_n_u32(bit_cast<uint32x4_t>(upper), 16));
#else
    return __builtin_convertvector(upper >> 16, ShortVec);
#endif
}

// ---- float16 -----------------------------------------------------------------------------------

#if defined(__aarch64__)
TIDE_INLINE Vec half_to_float(ShortVec h) {
    return bit_cast<Vec>(vcvt_f32_f16(bit_cast<float16x4_t>(h)));
}
TIDE_INLINE ShortVec float_to_half(Vec v) {
    return bit_cast<ShortVec>(vcvt_f16_f32(bit_cast<float32x4_t>(v)));
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

}  // namespace tide::TIDE_ISA
