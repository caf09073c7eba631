"""Why an op refuses its tensors: each error names the argument, what it got and what it expects.

The wrappers in `cpu` test everything in one cheap expression and call these checks only when it fails; those in `cuda`
always call them, since what runs often there is captured in a graph. Order matters: each check may rely on those before
it. `device` is where the tensors must be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tide_core.kernels.panels import Panels

# The codes of csrc/dtype.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CPU = torch.device("cpu")

Faults = Iterable[Exception | None]


def first_fault(faults: Faults) -> Exception:
    """The first fault; if there is none, the wrapper and this file disagree."""
    for fault in faults:
        if fault is not None:
            return fault
    return AssertionError("refused without a fault")


def refuse(faults: Faults) -> None:
    """Raise the first fault, if there is one."""
    for fault in faults:
        if fault is not None:
            raise fault


def linear_faults(x: Tensor, weight: Tensor, bias: Tensor | None, device: torch.device = CPU) -> Faults:
    yield float_fault("x", x, None, device)
    if not (x.dtype is torch.float32 and weight.dtype is torch.bfloat16):
        yield float_fault("weight", weight, x.dtype, device)
    yield dims_fault("weight", weight, 2)
    out_features, in_features = weight.shape
    yield width_fault("x", x, in_features, "weight", weight)
    yield contiguous_fault("weight", weight)
    yield unit_stride_fault("x", x)
    if bias is not None:
        yield float_fault("bias", bias, x.dtype, device)
        yield shape_fault("bias", bias, (out_features,), "[N]")
        yield contiguous_fault("bias", bias)


def quantised_linear_faults(x: Tensor, panels: Panels, bias: Tensor | None) -> Faults:
    yield float_fault("x", x, torch.float32)
    if x.dim() == 0 or x.shape[-1] != panels.in_features:
        yield ValueError(f"x: got shape {list(x.shape)}, expected [..., {panels.in_features}]")
    if bias is not None:
        yield float_fault("bias", bias, torch.float32)
        yield shape_fault("bias", bias, (panels.out_features,), "[N]")
        yield contiguous_fault("bias", bias)


def rms_norm_faults(x: Tensor, weight: Tensor, device: torch.device = CPU) -> Faults:
    yield float_fault("x", x, None, device)
    yield float_fault("weight", weight, x.dtype, device)
    yield dims_fault("weight", weight, 1)
    yield width_fault("x", x, weight.shape[0], "weight", weight)
    yield contiguous_fault("weight", weight)
    yield unit_stride_fault("x", x)


def silu_mul_faults(gate: Tensor, up: Tensor) -> Faults:
    yield float_fault("gate", gate)
    yield float_fault("up", up, gate.dtype)
    yield shape_fault("up", up, tuple(gate.shape), "as gate")
    yield contiguous_fault("gate", gate)
    yield contiguous_fault("up", up)


def rotary_faults(x: Tensor, cos: Tensor, sin: Tensor, device: torch.device = CPU) -> Faults:
    yield float_fault("x", x, None, device)
    yield dims_fault("x", x, 3)
    yield unit_stride_fault("x", x)
    num_tokens, _, dim = x.shape
    for name, tensor in (("cos", cos), ("sin", sin)):
        yield float_fault(name, tensor, x.dtype, device)
        yield shape_fault(name, tensor, (num_tokens, dim), "[T, D]")
        yield contiguous_fault(name, tensor)
    if dim % 2:
        yield ValueError(f"x: got heads of {dim} elements, expected an even number")


def write_kv_faults(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, device: torch.device = CPU
) -> Faults:
    yield float_fault("k", k, None, device)
    yield float_fault("v", v, k.dtype, device)
    yield from pool_faults(k_pool, v_pool, k.dtype, device)
    _, num_heads, _, key_dim = k_pool.shape
    yield dims_fault("k", k, 3)
    num_tokens = k.shape[0]
    yield shape_fault("k", k, (num_tokens, num_heads, key_dim), "[T, H, Dk]")
    yield shape_fault("v", v, (num_tokens, num_heads, v_pool.shape[3]), "[T, H, Dv]")
    yield unit_stride_fault("k", k)
    yield unit_stride_fault("v", v)
    yield from exact_faults("slots", slots, torch.int64, (num_tokens,), "[T]", device)


def paged_attention_faults(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    device: torch.device = CPU,
) -> Faults:
    yield float_fault("q", q, None, device)
    yield from pool_faults(k_pool, v_pool, q.dtype, device)
    _, num_kv_heads, _, key_dim = k_pool.shape
    yield dims_fault("q", q, 3)
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads or q.shape[2] != key_dim:
        yield shape_error("q", q, f"[T, a multiple of k_pool's {num_kv_heads} heads, {key_dim}]")
    yield unit_stride_fault("q", q)
    yield dims_fault("context_lens", context_lens, 1)
    num_rows = context_lens.shape[0]
    yield from exact_faults("context_lens", context_lens, torch.int32, (num_rows,), "[R]", device)
    yield from exact_faults("query_starts", query_starts, torch.int32, (num_rows + 1,), "[R + 1]", device)
    yield dims_fault("block_tables", block_tables, 2)
    shape = (num_rows, block_tables.shape[1])
    yield from exact_faults("block_tables", block_tables, torch.int32, shape, "[R, max_blocks]", device)


def held_faults(name: str, tensor: Tensor, shape: tuple[int, ...], *, narrow: bool = False) -> Faults:
    """For a tensor whose address a program keeps: float32, or bfloat16 if `narrow`."""
    if not (narrow and tensor.dtype is torch.bfloat16):
        expected = "torch.float32 or torch.bfloat16" if narrow else "torch.float32"
        yield None if tensor.dtype is torch.float32 else TypeError(f"{name}: got {tensor.dtype}, expected {expected}")
    yield device_fault(name, tensor, CPU)
    yield None if tensor.shape == shape else shape_error(name, tensor, str(list(shape)))
    yield contiguous_fault(name, tensor)


def program_pool_faults(k_pool: Tensor, v_pool: Tensor) -> Faults:
    yield from pool_faults(k_pool, v_pool, torch.float32)


def pool_faults(k_pool: Tensor, v_pool: Tensor, dtype: torch.dtype, device: torch.device = CPU) -> Faults:
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        yield float_fault(name, pool, dtype, device)
        yield dims_fault(name, pool, 4)
        yield contiguous_fault(name, pool)
    yield shape_fault("v_pool", v_pool, (*k_pool.shape[:3], v_pool.shape[3]), "[num_blocks, H, block_size, Dv]")


def exact_faults(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], letters: str, device: torch.device = CPU
) -> Faults:
    """For a contiguous tensor of exactly this dtype and shape."""
    yield None if tensor.dtype is dtype else TypeError(f"{name}: got {tensor.dtype}, expected {dtype}")
    yield device_fault(name, tensor, device)
    yield shape_fault(name, tensor, shape, letters)
    yield contiguous_fault(name, tensor)


def float_fault(
    name: str, tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device = CPU
) -> Exception | None:
    if tensor.dtype not in DTYPE_CODES:
        return TypeError(f"{name}: got {tensor.dtype}, expected float32, float16 or bfloat16")
    if dtype is not None and tensor.dtype is not dtype:
        return TypeError(f"{name}: got {tensor.dtype}, expected {dtype} as the first argument has")
    return device_fault(name, tensor, device)


def device_fault(name: str, tensor: Tensor, device: torch.device) -> ValueError | None:
    if tensor.device == device:
        return None
    return ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}")


def dims_fault(name: str, tensor: Tensor, dims: int) -> ValueError | None:
    return None if tensor.dim() == dims else shape_error(name, tensor, f"{dims} dimensions")


def shape_fault(name: str, tensor: Tensor, shape: tuple[int, ...], letters: str) -> ValueError | None:
    return None if tensor.shape == shape else shape_error(name, tensor, f"{letters} = {list(shape)}")


def width_fault(name: str, tensor: Tensor, width: int, other_name: str, other: Tensor) -> ValueError | None:
    if tensor.dim() > 0 and tensor.shape[-1] == width:
        return None
    return shape_error(name, tensor, f"[..., {width}] to match {other_name} {list(other.shape)}")


def shape_error(name: str, tensor: Tensor, expected: str) -> ValueError:
    return ValueError(f"{name}: got shape {list(tensor.shape)}, expected {expected}")


def contiguous_fault(name: str, tensor: Tensor) -> ValueError | None:
    if tensor.is_contiguous():
        return None
    return ValueError(f"{name}: got strides {list(tensor.stride())}, expected a contiguous tensor")


def unit_stride_fault(name: str, tensor: Tensor) -> ValueError | None:
    if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or tensor.numel() == 0:
        return None
    return ValueError(f"{name}: got stride {tensor.stride(-1)} in the last dimension, expected 1")
