"""Arguments for the ops of a cycle and weights of a router, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.draw_cases import cycle_of, numbers_of, params_of, settings_of
from tide_core.kernels.reference.branches import Claims
from tide_core.kernels.reference.cycle import sizes

ROWS, WIDTH, VOCABULARY, BOTTLENECK = 5, 48, 5000, 12
HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 2, 16, 8, 6


def router_weights(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    sizes = ((WIDTH,), (BOTTLENECK, WIDTH + 2), (BOTTLENECK,), (BOTTLENECK,), (1,))
    norm, down, down_bias, out, out_bias = (torch.randn(size, device=device) for size in sizes)
    return norm, down, down_bias, out, out_bias, 1e-5


def cycle_arguments(device: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Any, ...]]:
    """By the name of the op; for `copy_slots` the pools, the block size, and what the copier is called with."""

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def integers(values: list[Any], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    row_meta, next_state = integers([[7], [3], [2], [1], [9]], torch.int32), integers([[5] * 256] * 3, torch.int32)
    logits = torch.randn(ROWS, VOCABULARY, device=device).to(dtype)
    pools = [torch.randn(BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, device=device).to(dtype) for _ in range(2)]
    claims = Claims(integers([[0, 0], [1, 1]], torch.int32), integers([5]), integers([4, 5]))
    params = params_of(ROWS)
    num_wide, num_narrow = sizes(1, 2)
    plan = empty(num_wide), torch.zeros(num_narrow, dtype=torch.int32, device=device)
    return {
        "plan_cycle": (row_meta, next_state, integers([[3]], torch.int32), BLOCK_SIZE, 2, *plan),
        "pending_tokens": (
            *(integers(ids) for ids in ([7, 3], [[1, 0], [2, 2]], [40, 41, 42], [0, 2, 4, 1, 5])),
            *(empty(2, 2), empty(5)),
        ),
        "copy_slots": (pools, BLOCK_SIZE, *(integers(slots, torch.int32) for slots in ([3, -1], [40, 2])), claims),
        "draw": (logits, settings_of(params).to(device), numbers_of(3, ROWS).to(device), VOCABULARY),
        "verify_drawn": cycle_of(5, params, [2, 2, 1, 1, 0], torch.arange(0, 90, 3), 120, dtype=dtype, device=device),
        "nth_best": (logits, integers([0, 1, 2, 3, 0], torch.int32)),
    }
