// What branches of a draft need: the n-th best token of a row, and K, V and states of some tokens in other slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/dtype.h"

namespace tide::cuda {

// index[i] = where in row i of x the number stands that `ranks[i]` others are before: larger ones, and equal ones at
// lower places. NaN stands above every number.
struct NthBestParams {
    const void* x;         // [rows, width]
    const int32_t* ranks;  // [rows], each below width
    int64_t* index;        // [rows]
    int64_t rows;
    int64_t width;
    int64_t x_stride;
};

void nth_best(DType dtype, const NthBestParams& params, cudaStream_t stream);

// One pool [blocks, heads, block_size, bytes].
struct SlotPool {
    char* data;
    int64_t heads;
    int64_t bytes;  // of a head of a slot
};

// What lies in slot from[i] of every pool goes to slot to[i]; a pair with a negative slot is skipped. No slot that is
// written is read. With `claims` only where said[claims[i]] is tried[claims[count + i]].
struct CopySlotsParams {
    const SlotPool* pools;  // on the device
    const int32_t* from;    // [count]
    const int32_t* to;      // [count]
    const int32_t* claims;  // [2, count], or null
    const int64_t* said;
    const int64_t* tried;
    int64_t num_pools;
    int64_t count;
    int64_t block_size;
    int64_t unit;  // 16, 4 or 2: divides every `bytes` and address
};

void copy_slots(const CopySlotsParams& params, cudaStream_t stream);

}  // namespace tide::cuda
