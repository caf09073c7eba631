// Four products of codes for each output, added to a whole number: sums[i] += sum_j w[4 i + j] * x[j].
#pragma once

#include "cpu/kernels/vec.h"

namespace tide::TIDE_ISA {

#if defined(__AVX512VNNI__)
constexpr int kSignOffset = 128;  // the instruction wants codes without a sign, so those with one are moved up
#else
constexpr int kSignOffset = 0;
#endif

TIDE_INLINE BitVec four_codes(const int8_t* x) {
    uint32_t codes;
    __builtin_memcpy(&codes, x, sizeof(codes));
    return BitVec{} + codes;
}

// kSigned: w are int8, else 0 to 63. x are -127 to 127.
template <bool kSigned>
TIDE_INLINE IntVec add_dot4(BitVec w, const int8_t* x, IntVec sums) {
#if defined(__AVX512VNNI__)
    if constexpr (kSigned) w ^= 0x80808080u;
    return bit_cast<IntVec>(
        _mm512_dpbusd_epi32(bit_cast<__m512i>(sums), bit_cast<__m512i>(w), bit_cast<__m512i>(four_codes(x))));
#elif defined(__AVX512BW__)
    const __m512i codes = bit_cast<__m512i>(w), fours = bit_cast<__m512i>(four_codes(x));
    __m512i pairs;
    if constexpr (kSigned) {
        const __m512i turned = _mm512_mask_sub_epi8(fours, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), fours);
        pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned);
    } else {
        pairs = _mm512_maddubs_epi16(codes, fours);
    }
    return sums + bit_cast<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    const __m256i codes = bit_cast<__m256i>(w), fours = bit_cast<__m256i>(four_codes(x));
    __m256i pairs;
    if constexpr (kSigned)
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(fours, codes));
    else
        pairs = _mm256_maddubs_epi16(codes, fours);
    return sums + bit_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return bit_cast<IntVec>(
        vdotq_s32(bit_cast<int32x4_t>(sums), bit_cast<int8x16_t>(w), bit_cast<int8x16_t>(four_codes(x))));
#else
    const IntVec codes = bit_cast<IntVec>(w);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const IntVec one = codes << (24 - 8 * i);
        sums += (one >> 24) * x[i];  // codes without a sign are below 128
    }
    return sums;
#endif
}

}  // namespace tide::TIDE_ISA
