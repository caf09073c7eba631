// The kernels of the instruction set being compiled. Each file kernels/<name>.cpp defines one of them
// for the three storage types.
#pragma once

#include "cpu/kernels/params.h"

namespace tide::TIDE_ISA {

template <typename T>
void to_float(const void* from, float* to, int64_t count);

// T: of bias and y; W: of the weight.
template <typename T, typename W>
void linear(const LinearParams& params, int64_t first, int64_t last, float* scratch);
int64_t linear_scratch_floats(int64_t in_features);

// Rows [first, last) of x [.., in_features] to the 8 bits that quantised_linear reads, of quantised_row_bytes each.
void quantise_rows(const float* x, int64_t in_features, void* rows, int64_t first, int64_t last);
// Panels [first, last).
void quantised_linear(const QuantisedLinearParams& params, int64_t first, int64_t last);

template <typename T>
void rms_norm(const RmsNormParams& params, int64_t first, int64_t last);

template <typename T>
void silu_mul(const SiluMulParams& params, int64_t first, int64_t last);

template <typename T>
void rotary(const RotaryParams& params, int64_t first, int64_t last);

template <typename T>
void paged_attention(const PagedAttentionParams& params, const AttentionTask& task, float* scratch);
int64_t attention_scratch_floats(const PagedAttentionParams& params, int64_t max_queries);

// float32 alone: what they read is the end of a computation.
float maximum(const float* x, int64_t count);
Top2 top2_logsumexp(const float* x, int64_t count);

}  // namespace tide::TIDE_ISA

// Closes a kernel file: the kernel for each storage type.
#define TIDE_FOR_EACH_DTYPE(INSTANTIATE) INSTANTIATE(float) INSTANTIATE(Half) INSTANTIATE(BFloat16)
