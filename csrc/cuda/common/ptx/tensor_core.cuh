// The few instructions that the fast kernels are made of: asynchronous copies and 16x8x16 products (sm_80 and above).
#pragma once

#include <cstdint>

#include "cuda/common/convert.cuh"

namespace tide::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define TIDE_HAS_TENSOR_CORE_PATH 1
#else
#define TIDE_HAS_TENSOR_CORE_PATH 0  // kernels trap there: the host takes the plain ones
#endif

// The 16 bytes of eight half-width numbers.
constexpr int kVectorBytes = 16;
constexpr int kVector = 8;

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A number that all lanes of the warp have: the compiler may keep it, and what follows from it, once for all of them.
__device__ inline int same_in_warp(int v) {
    return __shfl_sync(~0u, v, 0);
}

#if TIDE_HAS_TENSOR_CORE_PATH

// Copies 16 bytes to shared memory in the background.
__device__ inline void copy_async(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same; the second-level cache reads the rest of the 128 too.
__device__ inline void copy_async_128(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies 4 bytes to shared memory in the background.
__device__ inline void copy_async_float(uint32_t to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copies 16 bytes, or 16 zero bytes without a read.
__device__ inline void copy_async_or_zero(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ inline uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The same, for data that should leave the second-level cache first.
__device__ inline void copy_async_or_zero(uint32_t to, const void* from, bool valid, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

__device__ inline void close_copy_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all of this thread's copy groups but the last kOpen have arrived.
template <int kOpen>
__device__ inline void wait_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Returns when all of this thread's copies have arrived, also those that no group was closed for.
__device__ inline void wait_all_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ inline uint4 load_shared(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

// 16 bytes, asked for here, or zeros.
__device__ inline uint4 load_global(const char* from, bool valid) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (valid)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from)
                     : "memory");
    return v;
}

// A float that no kernel writes, asked for here.
__device__ inline float load_weight_float(const float* from) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
}

__device__ inline float load_shared_float(uint32_t from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}

// Four 8x8 matrices: lane l names 16 bytes, row l % 8 of matrix l / 8, and gets numbers 2t, 2t + 1 of row g of each.
__device__ inline uint4 load_matrices(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

__device__ inline void store_shared(uint32_t to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// c += a b with a 16x16 (rows), b 16x8 (columns), c 16x8. Thread (g = lane / 4, t = lane % 4) holds
// a: rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 8, 2t + 8 (two each); b: column g at k = 2t, 2t + 8 (two each);
// c: row g at columns 2t, 2t + 1, then row g + 8.
__device__ inline void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                     uint32_t b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                     uint32_t b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The squares of row g in 32 columns, of which `x` is this thread's part: x times itself, of which thread (g, g / 2)
// has the diagonal.
__device__ inline float squares_of(const uint4& x) {
    float first[4], all[4];
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
        "{%7, %7, %7, %7};"
        : "=f"(first[0]), "=f"(first[1]), "=f"(first[2]), "=f"(first[3])
        : "r"(x.x), "r"(x.y), "r"(0), "f"(0.0f));
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
        "{%7, %8, %9, %10};"
        : "=f"(all[0]), "=f"(all[1]), "=f"(all[2]), "=f"(all[3])
        : "r"(x.z), "r"(x.w), "r"(0), "f"(first[0]), "f"(first[1]), "f"(first[2]), "f"(first[3]));
    const int lane = threadIdx.x % 32;
    return __shfl_sync(~0u, lane / 4 % 2 ? all[1] : all[0], lane / 4 * 4 + lane / 8);
}

#endif

}  // namespace tide::cuda
