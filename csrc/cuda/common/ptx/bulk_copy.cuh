// Copies that one thread asks for and the copy engine carries out (sm_90 and above), and the barriers they arrive at.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "cuda/common/launch.h"
#include "cuda/common/ptx/tensor_core.cuh"

namespace tide::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TIDE_HAS_BULK_COPY 1
#else
#define TIDE_HAS_BULK_COPY 0  // kernels trap there
#endif

// Rows of half-width numbers arrive as lines of 128 bytes, a box of rows line by line, each line swizzled: its vector v
// lies at v ^ row % 8. A box begins at a multiple of 1024 bytes.
constexpr int kLineBytes = 128;
constexpr int kLineVectors = kLineBytes / kVectorBytes;
constexpr int kLineElements = kLineBytes / 2;

// Byte offset of a vector of a row in a box of `rows`.
__device__ inline int line_offset(int rows, int row, int vector) {
    return (vector / kLineVectors * rows + row) * kLineBytes +
           ((vector % kLineVectors) ^ (row % kLineVectors)) * kVectorBytes;
}

// `dims` dimensions, the first without gaps: `sizes` and `box` in elements, `strides` in bytes, of all but the first.
// What a box has outside of the sizes arrives as zeros. The second-level cache reads `run` bytes where any are wanted.
inline CUtensorMap map_boxes(const char* op, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* data,
                             int dims, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                             int run = 256) {
    static const auto encode = [&] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result = {};
#if CUDART_VERSION >= 12050
        check(op,
              cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
        check(op, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
        if (found == nullptr) throw std::runtime_error(std::string(op) + ": the driver knows no tensor maps");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
    }();
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    if (encode(&map, type, static_cast<cuuint32_t>(dims), const_cast<void*>(data), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               run == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        throw std::runtime_error(std::string(op) + ": the driver refused a tensor map");
    return map;
}

// The same of half-width numbers in swizzled lines.
inline CUtensorMap map_boxes(const char* op, DType dtype, const void* data, int dims, const cuuint64_t* sizes,
                             const cuuint64_t* strides, const cuuint32_t* box, int run = 256) {
    const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return map_boxes(op, type, CU_TENSOR_MAP_SWIZZLE_128B, data, dims, sizes, strides, box, run);
}

// A pool of `size` contiguous rows of `width` elements, a multiple of 64, read `rows` at a time.
inline CUtensorMap map_rows(const char* op, DType dtype, const void* pool, int64_t size, int64_t width, int rows) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(size)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(width) * 2};
    const cuuint32_t box[] = {kLineElements, static_cast<cuuint32_t>(rows)};
    return map_boxes(op, dtype, pool, 2, sizes, strides, box);
}

// The same pool, read `rows` at a time, as one box: eight rows line by line, then the next eight. `size` and `rows` are
// multiples of 8.
inline CUtensorMap map_eights(const char* op, DType dtype, const void* pool, int64_t size, int64_t width, int rows) {
    const cuuint64_t eights = static_cast<cuuint64_t>(size / 8);
    const cuuint64_t row = static_cast<cuuint64_t>(width) * 2, lines = row / kLineBytes;
    const cuuint64_t sizes[] = {kLineElements, 8, lines, eights}, strides[] = {row, kLineBytes, 8 * row};
    const cuuint32_t box[] = {kLineElements, 8, static_cast<cuuint32_t>(lines), static_cast<cuuint32_t>(rows / 8)};
    return map_boxes(op, dtype, pool, 4, sizes, strides, box);
}

// Byte offset of a vector of a row in such a box of rows of `lines`.
__device__ inline int eights_offset(int lines, int row, int vector) {
    return (row / 8 * lines + vector / kLineVectors) * 8 * kLineBytes + line_offset(8, row % 8, vector % kLineVectors);
}

#if TIDE_HAS_BULK_COPY

// Each of its phases ends after so many arrivals.
__device__ inline void start_barrier(uint32_t barrier, int arrivals = 1) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// After start_barrier(), before the copy engine uses the barriers.
__device__ inline void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The barrier's next phase ends when so many bytes have arrived.
__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void wait_bytes(uint32_t barrier, uint32_t phase) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase)
                     : "memory");
    }
}

// The box of rows from `row` on, its line that begins at element `column`.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier,
                                uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// The same of a map of four dimensions.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int half, int group,
                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(half), "r"(group), "r"(barrier)
        : "memory");
}

// The same for data that should leave the second-level cache first.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int half, int group,
                                uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(half), "r"(group), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ inline void fetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What this thread wrote to shared memory comes before what the copy engine will write there.
__device__ inline void order_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What kernels that have ended wrote comes before what this thread will have copied.
__device__ inline void order_copies_after_stores() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif

}  // namespace tide::cuda
