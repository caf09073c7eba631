// E4M3 numbers in registers on their way to bfloat16: `bfloat16(float32(number) * scale)`, the rule of
// tide_core/kernels/fp8.py.
//
// Every E4M3 number is a normal float16 or zero, so the first step is exact; the product is rounded to float32 once,
// and that to bfloat16 once. Subnormal products stay: nothing here flushes, and nvcc does not unless it is told to.
// Without the instruction (before 8.9) bits are moved: sign to sign, the 4 bits of the exponent and the 3 of the
// mantissa to the lowest of float16's exponent and the highest of its mantissa. That is 2^-8 of the number, of
// subnormals too.
#pragma once

#include <type_traits>

#include "cuda/common/convert.cuh"

namespace tide::cuda {

// Four E4M3 numbers as float16: x has the first two, y the others.
__device__ inline uint2 halves_of(uint32_t four) {
    uint2 halves;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 first, last; mov.b32 {first, last}, %2; "
        "cvt.rn.f16x2.e4m3x2 %0, first; cvt.rn.f16x2.e4m3x2 %1, last; }"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(four));
#else
    const auto half_pair = [](uint32_t spread) {  // each number in the upper byte of its half
        const uint32_t bits = (spread & 0x80008000u) | (spread & 0x7f007f00u) >> 1;
        const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));
        return *reinterpret_cast<const uint32_t*>(&pair);
    };
    halves.x = half_pair(__byte_perm(four, 0, 0x1404));
    halves.y = half_pair(__byte_perm(four, 0, 0x3424));
#endif
    return halves;
}

// Two numbers of a pair times `scale`, as bfloat16.
__device__ inline uint32_t scale_pair(uint32_t halves, float scale) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack(__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale), __nv_bfloat16{});
}

// Four E4M3 numbers times `scale`, as bfloat16: x has the first two, y the others.
__device__ inline uint2 widen_four(uint32_t four, float scale) {
    const uint2 halves = halves_of(four);
    return {scale_pair(halves.x, scale), scale_pair(halves.y, scale)};
}

// Four numbers whose bits are dealt out over a word lie in its halves, two in each. The first is where bfloat16 has
// it: sign at 15, exponent and mantissa at 10 to 4. The second fills the gaps: its sign at 11, the upper three bits of
// its exponent at 14 to 12, its other four at 3 to 0. A number in place is 2^-120 of itself, of subnormals too, which
// the factor makes good: the one product rounds once, as the rule does, where the scale is a bfloat16.
__device__ inline uint2 spread_four(uint32_t four) {
    return {four & 0x87f087f0u, (four << 4 & 0x80f080f0u) | (four >> 4 & 0x07000700u)};
}

__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
}

// What numbers are multiplied with: their scale; of those dealt out, twice the scale times 2^120 in bfloat16. Such a
// scale is a normal bfloat16 below 2^7, so that its exponent can be added to.
struct ScaleFactor {
    using Type = float;
    __device__ static float of(float scale) { return scale; }
    __device__ static uint2 widen(uint32_t four, float factor) { return widen_four(four, factor); }
};
struct DealtFactor {
    using Type = uint32_t;
    __device__ static uint32_t of(float scale) {
        const uint32_t bits = __float_as_uint(scale);
        return __byte_perm(bits, bits, 0x3232) + 0x3c003c00u;
    }
    __device__ static uint2 widen(uint32_t four, uint32_t factor) {
        const uint2 spread = spread_four(four);
        return {multiply_halves(spread.x, factor), multiply_halves(spread.y, factor)};
    }
};

template <bool kDealt>
using Fp8Factor = std::conditional_t<kDealt, DealtFactor, ScaleFactor>;

}  // namespace tide::cuda
