"""What every CUDA wrapper uses: the module, addresses of tensors, and a launch on the caller's stream."""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks


@functools.cache
def module() -> ModuleType:
    """The CUDA module. It is imported when it is first needed, so that the wrappers load without it."""
    return importlib.import_module("tide_core.kernels._cuda")


@functools.cache
def fast_for_many_rows(device: torch.device) -> bool:
    """Whether our linear keeps up with Torch's there, in half width, for any number of rows."""
    with torch.cuda.device(device):
        fast: bool = module().fast_for_many_rows()
    return fast


@functools.cache
def reads_fp8(device: torch.device) -> bool:
    """Whether our linear reads weights in 8 bits there; else they are widened first."""
    with torch.cuda.device(device):
        reads: bool = module().reads_fp8()
    return reads


def device_of(tensor: Tensor) -> torch.device:
    """The device of a call: the GPU of its first tensor, or any GPU if that is on none."""
    return tensor.device if tensor.is_cuda else torch.device("cuda")


def launch(device: torch.device, op: str, *arguments: object, counters: Tensor | None = None) -> None:
    """Runs an op of the module on the current stream of `device`.

    `counters`: memory whose counters the op expects to be 0 and leaves at 0. If the op fails it is cleared, so that a
    caller who goes on does not count from where a broken call stopped."""
    stream = torch.cuda.current_stream(device).cuda_stream
    try:
        if torch.cuda.current_device() == device.index:
            getattr(module(), op)(*arguments, stream)
        else:
            with torch.cuda.device(device):
                getattr(module(), op)(*arguments, stream)
    except RuntimeError:
        if counters is not None:
            with contextlib.suppress(RuntimeError):  # a device that failed stays failed: the first error counts
                counters.zero_()
        raise


def ptr(tensor: Tensor | None) -> int:
    """The address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def row_stride(rows: Tensor) -> int:
    """Between the rows of [R, D]. That of a single row may be anything, and must not choose its kernel."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def as_rows(tensor: Tensor) -> Tensor:
    """`tensor` [..., D] as [rows, D]; copied only where it cannot be seen so."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def beside_weight(
    x: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None, rows: Tensor, gated: bool
) -> tuple[object, ...]:
    """What a linear of rows `x` into `rows` is handed after its weight; `norm` is the weight of a norm."""
    added = None if residual is None else as_rows(residual)
    addresses = ptr(bias), ptr(norm), ptr(added), ptr(rows)
    strides = row_stride(x), row_stride(rows), 0 if added is None else row_stride(added)
    return *addresses, rows.shape[0], x.shape[1], rows.shape[1], *strides, eps, gated


def result(
    out: Tensor | None,
    like: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    strided_heads: bool = False,
) -> Tensor:
    """Where an op writes: `out` if it fits, else a new tensor. `strided_heads`: only its last dimension has no gaps."""
    checks.refuse(cuda_checks.out_faults("out", out, like.dtype, shape, device, strided_heads=strided_heads))
    return like.new_empty(shape) if out is None else out
