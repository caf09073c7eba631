// The small ops. Each is one launch, takes the caller's stream and allocates nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/small_params.h"
#include "kernels/dtype.h"

namespace tide::cuda {

void rms_norm(DType dtype, const RmsNormParams& params, cudaStream_t stream);
void silu_mul(DType dtype, const SiluMulParams& params, cudaStream_t stream);
void rotary_write(DType dtype, const RotaryWriteParams& params, cudaStream_t stream);
void gather_rows(DType dtype, const RowsParams& params, cudaStream_t stream);
void scatter_rows(DType dtype, const RowsParams& params, cudaStream_t stream);
void exit_input(DType dtype, const ExitInputParams& params, cudaStream_t stream);

void peak(DType dtype, const PeakParams& params, cudaStream_t stream);
int64_t peak_partials(int64_t rows, int64_t width);  // bytes
void router(DType dtype, const RouterParams& params, cudaStream_t stream);

}  // namespace tide::cuda
