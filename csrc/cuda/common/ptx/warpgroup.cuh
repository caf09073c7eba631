// Products of four warps (sm_90a): 64 rows of a times kTokens rows of b, 16 columns, both in shared memory in the lines
// of bulk_copy.cuh, or a in registers. For each number they add up the same 16 products as one mma.sync does, to the
// same bits.
#pragma once

#include "cuda/common/ptx/bulk_copy.cuh"

namespace tide::cuda {

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "these sources are for sm_90a alone"
#endif

// The registers of each thread of the warpgroup from here on: more, or fewer.
template <int kCount>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Waits for the others of `kThreads` threads at barrier kBarrier of the CTA; 0 is that of __syncthreads().
template <int kBarrier, int kThreads>
__device__ inline void meet_at() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The descriptor of lines that begin at `address`: swizzled, 8 rows in 1024 bytes, the next 8 rows
// `eights` times as far.
__device__ inline uint64_t lines_at(uint32_t address, int eights = 1) {
    constexpr uint64_t kSwizzled = uint64_t{1} << 62, kEightRows = uint64_t{8 * kLineBytes / 16} << 32;
    return kSwizzled | kEightRows * eights | uint64_t{1} << 16 | (address & 0x3FFFF) >> 4;
}
constexpr uint64_t kNextColumns = 16 * 2 / 16;  // to add, for the next 16 columns of a line

// Around the products of a group of warps: what was written to registers is there; what follows is one group of
// products; all groups but the last kOpen are done.
__device__ inline void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kOpen>
__device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

// Numbers that products write or read are what they are here: the compiler knows nothing of products that are open.
template <int kCount>
__device__ inline void pin_registers(float (&numbers)[kCount]) {
#pragma unroll
    for (float& number : numbers) asm volatile("" : "+f"(number)::"memory");
}
template <int kCount>
__device__ inline void pin_registers(uint4 (&vectors)[kCount]) {
#pragma unroll
    for (uint4& v : vectors) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
}

// c += a b. Thread (warp w of 4, g, t) holds, for each 8 tokens, row 16 w + g at tokens 2t, 2t + 1, then row
// 16 w + g + 8.
#define TIDE_EIGHT(c, i)                                                                                        \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define TIDE_PRODUCT(tokens, type, numbers, descriptors, ...)                                              \
    asm volatile(                                                                                          \
        "{ .reg .pred add; setp.eq.u32 add, 0, 0; "                                                        \
        "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32." type "." type " {" numbers "}, " descriptors \
        ", add, 1, 1, 0, 0; }"                                                                             \
        : __VA_ARGS__                                                                                      \
        : "l"(a), "l"(b))
#define TIDE_NUMBERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TIDE_NUMBERS_64                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TIDE_NUMBERS_128                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63"

__device__ inline void multiply_lines(float (&c)[16], uint64_t a, uint64_t b, __nv_bfloat16) {
    TIDE_PRODUCT("32", "bf16", TIDE_NUMBERS_32, "%16, %17", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8));
}
__device__ inline void multiply_lines(float (&c)[16], uint64_t a, uint64_t b, __half) {
    TIDE_PRODUCT("32", "f16", TIDE_NUMBERS_32, "%16, %17", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8));
}
__device__ inline void multiply_lines(float (&c)[32], uint64_t a, uint64_t b, __nv_bfloat16) {
    TIDE_PRODUCT("64", "bf16", TIDE_NUMBERS_64, "%32, %33", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8), TIDE_EIGHT(c, 16),
                 TIDE_EIGHT(c, 24));
}
__device__ inline void multiply_lines(float (&c)[32], uint64_t a, uint64_t b, __half) {
    TIDE_PRODUCT("64", "f16", TIDE_NUMBERS_64, "%32, %33", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8), TIDE_EIGHT(c, 16),
                 TIDE_EIGHT(c, 24));
}
__device__ inline void multiply_lines(float (&c)[64], uint64_t a, uint64_t b, __nv_bfloat16) {
    TIDE_PRODUCT("128", "bf16", TIDE_NUMBERS_128, "%64, %65", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8), TIDE_EIGHT(c, 16),
                 TIDE_EIGHT(c, 24), TIDE_EIGHT(c, 32), TIDE_EIGHT(c, 40), TIDE_EIGHT(c, 48), TIDE_EIGHT(c, 56));
}
__device__ inline void multiply_lines(float (&c)[64], uint64_t a, uint64_t b, __half) {
    TIDE_PRODUCT("128", "f16", TIDE_NUMBERS_128, "%64, %65", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8), TIDE_EIGHT(c, 16),
                 TIDE_EIGHT(c, 24), TIDE_EIGHT(c, 32), TIDE_EIGHT(c, 40), TIDE_EIGHT(c, 48), TIDE_EIGHT(c, 56));
}

// The same with 16 columns of a in registers, those of multiply_tile() for each warp's 16 rows. `add`: to c, which else
// may hold anything. kTransposed: b is 16 lines of 64 numbers, which are its columns.
#define TIDE_HELD_PRODUCT(type)                                                                                \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type \
                 "." type " {" TIDE_NUMBERS_64 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38; }"               \
                 : TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8), TIDE_EIGHT(c, 16), TIDE_EIGHT(c, 24)                    \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)),                 \
                   "n"(kTransposed ? 1 : 0))
template <bool kTransposed>
__device__ inline void multiply_held(float (&c)[32], const uint4& a, uint64_t b, bool add, __nv_bfloat16) {
    TIDE_HELD_PRODUCT("bf16");
}
template <bool kTransposed>
__device__ inline void multiply_held(float (&c)[32], const uint4& a, uint64_t b, bool add, __half) {
    TIDE_HELD_PRODUCT("f16");
}
#undef TIDE_HELD_PRODUCT

// c += a b with 16 columns of a in registers, as above, and b in lines.
#define TIDE_HELD_LINES(tokens, numbers, more, ...)                                                             \
    asm volatile(                                                                                               \
        "{ .reg .pred add; setp.eq.u32 add, 0, 0; "                                                             \
        "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32.bf16.bf16 {" numbers "}, " more ", add, 1, 1, 0; }" \
        : __VA_ARGS__                                                                                           \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))
__device__ inline void multiply_held_lines(float (&c)[4], const uint4& a, uint64_t b) {
    TIDE_HELD_LINES("8", "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8", "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]));
}
__device__ inline void multiply_held_lines(float (&c)[8], const uint4& a, uint64_t b) {
    TIDE_HELD_LINES("16", "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12", TIDE_EIGHT(c, 0));
}
__device__ inline void multiply_held_lines(float (&c)[16], const uint4& a, uint64_t b) {
    TIDE_HELD_LINES("32", TIDE_NUMBERS_32, "{%16, %17, %18, %19}, %20", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8));
}
__device__ inline void multiply_held_lines(float (&c)[32], const uint4& a, uint64_t b) {
    TIDE_HELD_LINES("64", TIDE_NUMBERS_64, "{%32, %33, %34, %35}, %36", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8),
                    TIDE_EIGHT(c, 16), TIDE_EIGHT(c, 24));
}
__device__ inline void multiply_held_lines(float (&c)[64], const uint4& a, uint64_t b) {
    TIDE_HELD_LINES("128", TIDE_NUMBERS_128, "{%64, %65, %66, %67}, %68", TIDE_EIGHT(c, 0), TIDE_EIGHT(c, 8),
                    TIDE_EIGHT(c, 16), TIDE_EIGHT(c, 24), TIDE_EIGHT(c, 32), TIDE_EIGHT(c, 40), TIDE_EIGHT(c, 48),
                    TIDE_EIGHT(c, 56));
}
#undef TIDE_HELD_LINES
#undef TIDE_EIGHT
#undef TIDE_PRODUCT
#undef TIDE_NUMBERS_32
#undef TIDE_NUMBERS_64
#undef TIDE_NUMBERS_128

}  // namespace tide::cuda
