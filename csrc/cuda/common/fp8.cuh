// E4M3 numbers in registers on their way to bfloat16: `bfloat16(float32(number) * scale)`, the rule of
// tide_core/kernels/fp8.py.
//
// Every E4M3 number is a normal float16 or zero, so the first step is exact; the product is rounded to float32 once,
// and that to bfloat16 once. Subnormal products stay: nothing here flushes, and nvcc does not unless it is told to.
// Without the instruction (before 8.9) bits are moved: sign to sign, the 4 bits of the exponent and the 3 of the
// mantissa to the lowest of float16's exponent and the highest of its mantissa. That is 2^-8 of the number, of
// subnormals too.
#pragma once

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

}  // namespace tide::cuda
