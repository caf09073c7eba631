"""Arguments for every op of the library, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.draw_cases import cycle_of, numbers_of, params_of, settings_of
from tide_core.kernels.reference.cycle import sizes

ROWS, WIDTH, VOCABULARY, BOTTLENECK = 5, 48, 5000, 12
HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 2, 16, 8, 6
WORKSPACE = 2**18
"""Bytes that attention counts in, for contexts of one chunk."""


def router_weights(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    sizes = ((WIDTH,), (BOTTLENECK, WIDTH + 2), (BOTTLENECK,), (BOTTLENECK,), (1,))
    norm, down, down_bias, out, out_bias = (torch.randn(size, device=device) for size in sizes)
    return norm, down, down_bias, out, out_bias, 1e-5


def pools(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


def library_cases(device: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Any, ...]]:
    """Arguments by the name of the op."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def empty(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=like, device=device)

    def integers(values: list[int], kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    x, weight, norm = randn(ROWS, WIDTH), randn(2 * WIDTH, WIDTH) / 7, randn(WIDTH)
    residual = randn(ROWS, WIDTH)
    logits = randn(ROWS, VOCABULARY)
    best, second = torch.rand(ROWS, device=device) + 2, torch.rand(ROWS, device=device)
    peaks = best, second, torch.rand(ROWS, device=device) + 1
    thresholds = torch.full((ROWS,), 0.5, device=device)
    index = integers([3, 0, -1, 4, 1], torch.int64)
    positions, slots = integers([0, 1, 9, 3, 2], torch.int64), integers([0, 1, 17, -1, 40], torch.int64)
    distances = integers([1, 0, 2, 9, 3], torch.int64)
    exit_input = residual, norm, randn(7, WIDTH), index, randn(WIDTH), distances, randn(4, 2 * WIDTH), 1e-5
    num_rows = integers([3], torch.int32)
    cos, sin = randn(10, HEAD_DIM), randn(10, HEAD_DIM)
    qkv, heads = randn(ROWS, (4 + 2 * HEADS) * HEAD_DIM), randn(ROWS, HEADS, HEAD_DIM)
    head_norms = randn(HEAD_DIM), randn(HEAD_DIM)
    q = randn(ROWS, 4, HEAD_DIM)
    attention = (
        integers([[0, 1], [2, 3]], torch.int32).view(2, 2),
        integers([0, 2, 5], torch.int32),
        integers([9, 12], torch.int32),
    )
    params = params_of(ROWS)
    drawn = cycle_of(5, params, [2, 2, 1, 1, 0], torch.arange(0, 90, 3), 120, dtype=dtype, device=device)
    counters = empty(ROWS, like=torch.int32)
    partials = empty(16 * ROWS * 2 + 4 * ROWS * BOTTLENECK, like=torch.uint8)
    floats = [empty(ROWS, like=torch.float32) for _ in range(4)]
    places = empty(ROWS, like=torch.int64)
    return {
        "linear": (x, weight, randn(2 * WIDTH), residual, True, norm, 1e-5),
        "rms_norm": (x, norm, 1e-5),
        "silu_mul": (x, residual),
        "rotary": (heads, cos[:ROWS], sin[:ROWS]),
        "rotary_write": (qkv, cos, sin, positions, slots, *pools(device, dtype), *head_norms, 1e-6),
        "write_kv": (heads, heads + 1, *pools(device, dtype), slots),
        "paged_attention": (q, *pools(device, dtype), *attention, 0.25, 4, 3.0),
        "attend_joined": (
            *(qkv, cos, sin, positions, slots, *pools(device, dtype), *head_norms, 1e-6),
            *(*attention, 0.25, 4, 3.0, 3, 16),
        ),
        "peak": (logits,),
        "router": (x, *peaks, *router_weights(device), thresholds),
        "gather_rows": (x, index),
        "scatter_rows": (x, index, randn(7, WIDTH)),
        "embed": (index.abs(), weight),
        "exit_input": exit_input,
        "linear_out": (x, weight, randn(2 * WIDTH), residual, True, norm, 1e-5, num_rows, empty(ROWS, WIDTH)),
        "rms_norm_out": (x, norm, 1e-5, index, num_rows, empty(ROWS, WIDTH)),
        "silu_mul_out": (x, residual, num_rows, empty(ROWS, WIDTH)),
        "rotary_write_out": (
            *(qkv, cos, sin, positions, slots, *pools(device, dtype), *head_norms, 1e-6, num_rows),
            empty(ROWS, 4, HEAD_DIM),
        ),
        "paged_attention_out": (
            *(q, *pools(device, dtype), *attention, 0.25, 4, 3.0, 3, 16, num_rows.clamp(max=2)),
            *(empty(WORKSPACE, like=torch.uint8), empty(ROWS, 4, HEAD_DIM)),
        ),
        "peak_out": (logits, num_rows, partials, counters, floats[0], places, floats[1], floats[2]),
        "router_out": (
            *(x, *peaks, *router_weights(device), thresholds, num_rows, partials, counters),
            *(floats[3], empty(ROWS, like=torch.int32)),
        ),
        "gather_rows_out": (x, index, num_rows, empty(ROWS, WIDTH)),
        "exit_input_out": (*exit_input, num_rows, empty(ROWS, 2 * WIDTH)),
        "plan_cycle": (
            *(integers([7, 3, 2, 1], torch.int32).view(4, 1), integers([[5] * 256] * 2, torch.int32)),
            *(integers([[3]], torch.int32), BLOCK_SIZE, 2),
            *(empty(size, like=kind) for size, kind in zip(sizes(1, 2), (torch.int64, torch.int32), strict=True)),
        ),
        "carry_on": (
            *(integers([7, 3, 2, 1], torch.int32).view(4, 1), integers([0, 3], torch.int32)),
            *(integers([3, 4, 5], torch.int64), integers([[6], [9]], torch.int64), integers([6, 8, 9], torch.int64)),
            *(1, integers([[5] * 256] * 2, torch.int32), empty(2, 1, like=torch.int64)),
        ),
        "pending_tokens": (
            *(integers(ids, torch.int64) for ids in ([7, 3], [[1, 0], [2, 2]], [40, 41, 42], [0, 2, 4, 1, 5])),
            *(empty(2, 2, like=torch.int64), empty(5, like=torch.int64)),
        ),
        "copy_slots": (
            *(list(pools(device, dtype)), *(integers(s, torch.int32) for s in ([3, -1], [40, 2])), BLOCK_SIZE),
            *(integers([[0, 0], [1, 1]], torch.int32), integers([5], torch.int64), integers([4, 5], torch.int64)),
        ),
        "draw": (logits, settings_of(params).to(device), numbers_of(3, ROWS).to(device), VOCABULARY),
        "verify_drawn": (drawn[0], *drawn[1]),
        "nth_best": (logits, integers([0, 1, 2, 3, 0], torch.int32)),
    }
