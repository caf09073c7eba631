"""Linears of weights in 8 bits. They have the bits of `cuda.ops.linear` with the widened matrix, for any rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.launch import as_rows, beside_weight, device_of, launch, ptr, result, row_stride
from tide_core.kernels.fp8 import Fp8Weight, can_deal, repacked
from tide_core.kernels.reference.ops import Norm

_WHOLE_ROWS = 31
"""`kWholeRows` of csrc/cuda/linear/linear.h: the scales are those of whole rows."""


def packed(weight: Fp8Weight) -> Fp8Weight:
    """A copy whose columns, or bits, lie as the kernels read them fastest. ValueError names what they cannot read."""
    checks.refuse([cuda_checks.packing_fault(weight)])
    return weight if weight.packed else repacked(weight, dealt=can_deal(weight.scales))


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`cuda.ops.linear` of a packed weight, on a GPU that `reads_fp8`. `x` that is not in whole vectors is copied."""
    device = device_of(x)
    checks.refuse(cuda_checks.fp8_linear_faults(x, weight, bias, residual, gated, norm, device))
    y = result(out, x, (*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]), device)
    if y.numel():
        x, rows = as_rows(x), as_rows(y)
        if x.data_ptr() % 16 or row_stride(x) % 8:
            x = x.clone(memory_format=torch.contiguous_format)
        factors, eps = (None, 0.0) if norm is None else norm
        if factors is not None and factors.data_ptr() % 16:
            factors = factors.clone()
        others = beside_weight(x, bias, factors, eps, residual, rows, gated)
        launch(device, "fp8_linear", ptr(x), *_arguments(weight), *others)
    return y


def widen_fp8(weight: Fp8Weight, *, out: Tensor | None = None) -> Tensor:
    """The matrix that `fp8_linear` multiplies with, in bfloat16 [N, K]. A linear of ours may follow in a graph: it
    starts when this has ended."""
    device = device_of(weight.values)
    checks.refuse(cuda_checks.fp8_weight_faults(weight, device))
    checks.refuse(cuda_checks.out_faults("out", out, torch.bfloat16, tuple(weight.shape), device))
    y = torch.empty(weight.shape, dtype=torch.bfloat16, device=device) if out is None else out
    checks.refuse([checks.contiguous_fault("out", y)])
    if y.numel():
        launch(device, "widen_fp8", *_arguments(weight), ptr(y), *y.shape)
    return y


def _arguments(weight: Fp8Weight) -> tuple[int, int, int, int, int, bool]:
    """Addresses of weight and scales, the stride of the scales, rows of a block, columns as a shift, whether dealt."""
    columns = weight.shape[1]
    shift = _WHOLE_ROWS if weight.block_columns >= columns else weight.block_columns.bit_length() - 1
    scale_stride = weight.scales.stride(0) if weight.scales.shape[0] > 1 else weight.scales.shape[1]
    return ptr(weight.values), ptr(weight.scales), scale_stride, weight.block_rows, shift, weight.dealt
