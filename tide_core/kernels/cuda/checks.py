"""What the CUDA wrappers ask of their tensors beyond what `checks` asks for both devices.

Rows may have a stride. `out` is checked like every other argument; nothing is read from the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.checks import Faults
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.reference.ops import Norm, RouterWeights, Top2

MAX_HEAD_DIM = 256
"""Of paged attention."""

MOST_JOINED_QUERIES = 8
"""Of a row, where attention also rotates and writes."""


def linear_faults(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    norm: Norm | None,
    device: torch.device,
) -> Faults:
    yield checks.float_fault("x", x, None, device)
    yield checks.float_fault("weight", weight, x.dtype, device)
    yield from checks.linear_faults(x, weight, bias, device)
    yield from _fused_faults(x, weight, residual, gated, norm, device)


def fp8_linear_faults(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    norm: Norm | None,
    device: torch.device,
) -> Faults:
    yield checks.float_fault("x", x, None, device)
    yield fp8_states_fault(x)
    yield from fp8_weight_faults(weight, device)
    yield checks.width_fault("x", x, weight.shape[1], "weight", weight.values)
    yield checks.unit_stride_fault("x", x)
    if bias is not None:
        yield from checks.exact_faults("bias", bias, x.dtype, (weight.shape[0],), "[N]", device)
    yield from _fused_faults(x, weight.values, residual, gated, norm, device)


def _fused_faults(
    x: Tensor, weight: Tensor, residual: Tensor | None, gated: bool, norm: Norm | None, device: torch.device
) -> Faults:
    """Of what is fused with a linear."""
    if gated and weight.shape[0] % 2:
        yield checks.shape_error("weight", weight, "[2 N, K]: as many rows of the gate as of up")
    if norm is not None:
        yield from checks.exact_faults("norm", norm[0], x.dtype, (x.shape[-1],), "[K]", device)
    if residual is not None:
        width = weight.shape[0] // 2 if gated else weight.shape[0]
        yield checks.float_fault("residual", residual, x.dtype, device)
        yield checks.shape_fault("residual", residual, (*x.shape[:-1], width), "[..., N]")
        yield rows_fault("residual", residual)


def fp8_weight_faults(weight: Fp8Weight, device: torch.device) -> Faults:
    yield checks.device_fault("weight", weight.values, device)
    yield checks.device_fault("weight.scales", weight.scales, device)
    yield packing_fault(weight)
    if not weight.packed:
        yield ValueError("weight: got columns in their own order, expected a matrix from cuda.fp8.packed")
    yield checks.contiguous_fault("weight", weight.values)
    yield checks.unit_stride_fault("weight.scales", weight.scales)
    if weight.values.data_ptr() % 16:
        yield ValueError("weight: got an address that is no multiple of 16 bytes")


def packing_fault(weight: Fp8Weight) -> ValueError | None:
    """Why the kernels cannot read a matrix of this width or with these blocks, packed or not; or None."""
    columns, block = weight.shape[1], weight.block_columns
    if columns == 0 or columns % 16:
        return ValueError(f"weight: got {columns} columns in 8 bits, expected a multiple of 16")
    if block < columns and (block < 64 or block & (block - 1)):
        return ValueError(
            f"weight: got scales of {block} columns, expected a power of two from 64 on, or all {columns}"
        )
    return None


def fp8_states_fault(x: Tensor) -> TypeError | None:
    if x.dtype is torch.bfloat16:
        return None
    return TypeError(f"x: got {x.dtype}, expected torch.bfloat16 with a weight in 8 bits")


def silu_mul_faults(gate: Tensor, up: Tensor, device: torch.device) -> Faults:
    yield checks.float_fault("gate", gate, None, device)
    yield checks.float_fault("up", up, gate.dtype, device)
    yield checks.shape_fault("up", up, tuple(gate.shape), "as gate")
    yield checks.unit_stride_fault("gate", gate) if gate.dim() else checks.shape_error("gate", gate, "[..., N]")
    yield checks.unit_stride_fault("up", up)


def rotary_write_faults(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    device: torch.device,
) -> Faults:
    yield checks.float_fault("qkv", qkv, None, device)
    yield checks.dims_fault("qkv", qkv, 2)
    yield checks.unit_stride_fault("qkv", qkv)
    yield from checks.pool_faults(k_pool, v_pool, qkv.dtype, device)
    yield checks.shape_fault("v_pool", v_pool, tuple(k_pool.shape), "as k_pool")
    num_tokens, width = qkv.shape
    num_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    if head_dim == 0 or head_dim % 2:
        yield checks.shape_error("k_pool", k_pool, "heads of an even number of elements")
    if width % head_dim or width < 2 * num_heads * head_dim:
        yield checks.shape_error("qkv", qkv, f"[T, (Hq + 2 * {num_heads}) * {head_dim}]")
    yield checks.dims_fault("cos", cos, 2)
    for name, table in (("cos", cos), ("sin", sin)):
        yield checks.float_fault(name, table, qkv.dtype, device)
        yield checks.shape_fault(name, table, (cos.shape[0], head_dim), "[P, D]")
        yield checks.contiguous_fault(name, table)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            yield from checks.exact_faults(name, weight, qkv.dtype, (head_dim,), "[D]", device)
    if positions is None:
        yield checks.shape_fault("cos", cos, (num_tokens, head_dim), "[T, D], without positions")
    else:
        yield from checks.exact_faults("positions", positions, torch.int64, (num_tokens,), "[T]", device)
    yield from checks.exact_faults("slots", slots, torch.int64, (num_tokens,), "[T]", device)


def paged_attention_faults(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    device: torch.device,
) -> Faults:
    tensors = q, k_pool, v_pool, block_tables, query_starts, context_lens
    yield from checks.paged_attention_faults(*tensors, device)
    yield checks.shape_fault("v_pool", v_pool, tuple(k_pool.shape), "as k_pool")
    if q.shape[2] % 8 or not 0 < q.shape[2] <= MAX_HEAD_DIM:
        yield ValueError(f"q: got heads of {q.shape[2]} elements, expected a multiple of 8 up to {MAX_HEAD_DIM}")
    if k_pool.shape[2] == 0 or k_pool.shape[2] % 8:
        yield ValueError(f"k_pool: got blocks of {k_pool.shape[2]} positions, expected a multiple of 8")
    yield pool_size_fault(tuple(k_pool.shape))


def pool_size_fault(shape: tuple[int, ...]) -> Exception | None:
    """Why a pool of this shape is too large: the kernels count its rows of a head in 32 bits."""
    rows = math.prod(shape[:3])
    return None if rows < 2**31 else ValueError(f"k_pool: got {rows} rows of a head, expected less than 2**31")


def joined_fault(k_pool: Tensor, v_pool: Tensor) -> Exception | None:
    """Why attention cannot also rotate and write with pools such as these, or None."""
    if k_pool.dtype not in (torch.float16, torch.bfloat16):
        return TypeError(f"k_pool: got {k_pool.dtype}, expected torch.float16 or torch.bfloat16")
    _, _, block_size, head_dim = k_pool.shape
    if head_dim not in (64, 128):
        return ValueError(f"k_pool: got heads of {head_dim} elements, expected 64 or 128")
    if block_size == 0 or block_size % 16:
        return ValueError(f"k_pool: got blocks of {block_size} positions, expected a multiple of 16")
    return checks.shape_fault("v_pool", v_pool, tuple(k_pool.shape), "as k_pool")


def top2_faults(logits: Tensor, device: torch.device) -> Faults:
    yield from matrix_faults("logits", logits, device)
    if not 0 < logits.shape[1] < 2**31:
        yield checks.shape_error("logits", logits, "rows of 1 to 2**31 - 1 numbers")


def router_faults(features: Tensor, top2: Top2, weights: RouterWeights, device: torch.device) -> Faults:
    yield from matrix_faults("features", features, device)
    num_rows, width = features.shape
    for name in ("best", "second", "sum"):
        yield from checks.exact_faults(f"top2.{name}", getattr(top2, name), torch.float32, (num_rows,), "[R]", device)
    yield checks.dims_fault("weights.down", weights.down, 2)
    bottleneck = weights.down.shape[0]
    if not 0 < bottleneck < 2**24:
        yield checks.shape_error("weights.down", weights.down, "a bottleneck of 1 to 2**24 - 1 numbers")
    for name, shape, letters in (
        ("norm", (width,), "[D]"),
        ("down", (bottleneck, width + 2), "[B, D + 2]"),
        ("down_bias", (bottleneck,), "[B]"),
        ("out", (bottleneck,), "[B]"),
        ("out_bias", (1,), "[1]"),
    ):
        yield from checks.exact_faults(f"weights.{name}", getattr(weights, name), torch.float32, shape, letters, device)


def exit_input_faults(
    states: Tensor,
    state_norm: Tensor,
    deep_states: Tensor,
    deep_slots: Tensor,
    deep_norm: Tensor,
    distances: Tensor,
    table: Tensor,
    *,
    device: torch.device,
) -> Faults:
    yield from matrix_faults("states", states, device)
    num_tokens, width = states.shape
    yield from matrix_faults("deep_states", deep_states, device, states.dtype)
    deep_width = deep_states.shape[1]
    for name, weight, size, letters in (
        ("state_norm", state_norm, width, "[D]"),
        ("deep_norm", deep_norm, deep_width, "[d]"),
    ):
        yield from checks.exact_faults(name, weight, states.dtype, (size,), letters, device)
    for name, numbers in (("deep_slots", deep_slots), ("distances", distances)):
        yield from checks.exact_faults(name, numbers, torch.int64, (num_tokens,), "[T]", device)
    yield checks.dims_fault("table", table, 2)
    if table.shape[0] == 0:
        yield checks.shape_error("table", table, "a row for every distance from 0 on")
    shape = table.shape[0], width + deep_width
    yield from checks.exact_faults("table", table, states.dtype, shape, "[M + 1, D + d]", device)


def matrix_faults(
    name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None, width: int | None = None
) -> Faults:
    """Of rows that may have a stride."""
    yield checks.float_fault(name, tensor, dtype, device)
    yield checks.dims_fault(name, tensor, 2)
    if width is not None:
        yield checks.shape_fault(name, tensor, (tensor.shape[0], width), "[..., D]")
    yield checks.unit_stride_fault(name, tensor)


def scratch_faults(name: str, tensor: Tensor, dtype: torch.dtype, count: int, device: torch.device) -> Faults:
    """Of memory that a kernel works in: at least `count` elements."""
    yield None if tensor.dtype is dtype else TypeError(f"{name}: got {tensor.dtype}, expected {dtype}")
    yield checks.device_fault(name, tensor, device)
    yield checks.contiguous_fault(name, tensor)
    if tensor.numel() < count:
        yield ValueError(f"{name}: got {tensor.numel()} elements, expected at least {count}")


def out_faults(
    name: str,
    out: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    strided_heads: bool = False,
) -> Faults:
    """Of a tensor that is written, where the caller gives one."""
    if out is not None:
        yield None if out.dtype is dtype else TypeError(f"{name}: got {out.dtype}, expected {dtype}")
        yield checks.device_fault(name, out, device)
        yield checks.shape_fault(name, out, shape, "the result's")
        yield checks.unit_stride_fault(name, out) if strided_heads else rows_fault(name, out)


def rows_fault(name: str, tensor: Tensor) -> ValueError | None:
    """Why `tensor` [..., D] cannot be seen as rows where it lies, or None."""
    if tensor.dim() == 2:
        return checks.unit_stride_fault(name, tensor)
    return checks.contiguous_fault(name, tensor)
