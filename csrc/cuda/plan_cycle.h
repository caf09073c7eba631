// The indices of a cycle, made on the device. tide_core/kernels/cycle_plan.py says what each part means.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tide::cuda {

constexpr int kMostCycleRows = 256;

struct PlanCycleParams {
    const int32_t* about;   // [4, rows]: newest token, its position, drafts (-1: no row), whether it may leave early
    const int32_t* tables;  // [rows, blocks]
    int64_t* wide;          // the 64-bit parts, one behind another
    int32_t* narrow;        // the 32-bit parts
    int64_t rows;           // at most kMostCycleRows, by falling number of drafts
    int64_t drafts;
    int64_t blocks;
    int64_t block_size;
};

void plan_cycle(const PlanCycleParams& params, cudaStream_t stream);

}  // namespace tide::cuda
