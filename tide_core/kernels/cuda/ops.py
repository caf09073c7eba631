"""The ops on a GPU, by the CUDA module. For inference only: no gradient flows through them.

`reference.ops` defines each op. A row's result is bitwise the same alone and in any batch. Every
op runs on the current stream, waits for nothing and can be captured in a graph. With `out` it allocates nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.attention import attention_workspace, paged_attention, rotary, rotary_write, write_kv
from tide_core.kernels.cuda.exits import Scratch, embed, exit_input, router, scatter_rows, top2_logsumexp
from tide_core.kernels.cuda.fp8 import fp8_linear, widen_fp8
from tide_core.kernels.cuda.joined import attend_joined, supports_joined
from tide_core.kernels.cuda.launch import (
    as_rows,
    beside_weight,
    device_of,
    fast_for_many_rows,
    launch,
    ptr,
    reads_fp8,
    result,
    row_stride,
)
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.cycle import MOST_ROWS
from tide_core.kernels.reference.ops import Norm

__all__ = [
    "Scratch",
    "attend_joined",
    "attention_workspace",
    "embed",
    "exit_input",
    "fp8_linear",
    "fused_linear_of_any",
    "linear",
    "linear_of_any",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotary_write",
    "router",
    "scatter_rows",
    "silu_mul",
    "supports",
    "supports_joined",
    "top2_logsumexp",
    "widen_fp8",
    "write_kv",
]

_DTYPE_CODES = checks.DTYPE_CODES
WIDEST_NORMED = 2048
"""Inputs up to this width are normed inside the linear."""


def linear(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N]; as `fused_linear` where more is asked.

    `residual` may be `out`. A norm is worked into the products: its weight meets `x` in one rounding, the factor of the
    row meets the float32 sum. In float16 that could overflow, so there it is an op of its own with a result of its own.
    A weight in 8 bits is packed (`cuda.fp8`), its states are bfloat16, and the bits are those of the widened matrix.
    """
    device = device_of(x)
    if isinstance(weight, Fp8Weight):
        if reads_fp8(device):
            return fp8_linear(x, weight, bias, residual=residual, gated=gated, norm=norm, out=out)
        weight = _widened(x, weight)
    checks.refuse(cuda_checks.linear_faults(x, weight, bias, residual, gated, norm, device))
    if norm is not None and x.dtype is torch.float16:
        x, norm = rms_norm(x, *norm), None
    y = result(out, x, (*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]), device)
    if y.numel():
        x, rows = as_rows(x), as_rows(y)
        factors, eps = (None, 0.0) if norm is None else norm
        others = beside_weight(x, bias, factors, eps, residual, rows, gated)
        launch(device, "linear", _DTYPE_CODES[x.dtype], ptr(x), ptr(weight), *others)
    return y


def linear_of_any(x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Our `linear`, or Torch's where ours is slow for so many rows."""
    return linear(x, weight, bias) if _is_ours(x) else F.linear(x, _widened(x, weight), bias)


def fused_linear_of_any(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
) -> Tensor:
    """`linear` fused with its norm, gate and residual, likewise. For wide rows the norm is a launch of its own: that
    is faster. A model always uses the same of both, so that bits never depend on the rows."""
    if norm is not None and x.shape[-1] > WIDEST_NORMED:
        x, norm = rms_norm(x, *norm), None
    if _is_ours(x):
        return linear(x, weight, bias, residual=residual, gated=gated, norm=norm)
    x = x if norm is None else rms_norm(x, *norm)
    return reference.fused_linear(x, _widened(x, weight), bias, residual, gated)


def _widened(x: Tensor, weight: Tensor | Fp8Weight) -> Tensor:
    """As a tensor, for states `x`: one in 8 bits is widened into memory of this call."""
    if isinstance(weight, Tensor):
        return weight
    checks.refuse([cuda_checks.fp8_states_fault(x)])
    return widen_fp8(weight)


def _is_ours(x: Tensor) -> bool:
    """True for few rows, and for many where we have a kernel for them: it gives a row the same bits. Narrow rows have a
    fused norm, which that kernel does not support."""
    width = x.shape[-1]
    if x.numel() <= MOST_ROWS * width:
        return True
    return width > WIDEST_NORMED and width % 8 == 0 and x.dtype is not torch.float32 and fast_for_many_rows(x.device)


def supports(k_pool: Tensor, v_pool: Tensor) -> bool:
    """Whether attention supports heads and pages of these sizes."""
    _, _, block_size, head_dim = k_pool.shape
    fits = head_dim % 8 == 0 and head_dim <= cuda_checks.MAX_HEAD_DIM and block_size % 8 == 0
    return fits and k_pool.shape == v_pool.shape


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Hugging Face LlamaRMSNorm of `x` [..., D] with `weight` [D]; `out` may be `x`."""
    device = device_of(x)
    checks.refuse(checks.rms_norm_faults(x, weight, device))
    y = result(out, x, tuple(x.shape), device)
    if y.numel():
        x, rows = as_rows(x), as_rows(y)
        tensors = ptr(x), ptr(weight), ptr(rows)
        launch(device, "rms_norm", _DTYPE_CODES[x.dtype], *tensors, *rows.shape, row_stride(x), row_stride(rows), eps)
    return y


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu of `gate` times `up`, of one shape [..., N]; `out` may be either."""
    device = device_of(gate)
    checks.refuse(cuda_checks.silu_mul_faults(gate, up, device))
    y = result(out, gate, tuple(gate.shape), device)
    if y.numel():
        gate, up, rows = as_rows(gate), as_rows(up), as_rows(y)
        strides = row_stride(gate), row_stride(up), row_stride(rows)
        code = _DTYPE_CODES[gate.dtype]
        launch(device, "silu_mul", code, ptr(gate), ptr(up), ptr(rows), *rows.shape, *strides)
    return y
