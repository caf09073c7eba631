"""The ops of a captured cycle as `torch.ops.tide.*`. See `library`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tide_core.kernels.cuda import branches as cuda_branches
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.cuda import draw as cuda_draw
from tide_core.kernels.library_register import returning, writing
from tide_core.kernels.reference import branches as branching
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference.branches import Claims
from tide_core.kernels.reference.draw import NUM_HEAD, DrawnCycle

__all__: list[str] = []

_DRAWN = ", ".join(f"Tensor {name}" for name in DrawnCycle._fields)


def _copy_slots(pools: Sequence[Tensor], source: Tensor, target: Tensor, block_size: int, *claims: Any) -> None:
    cuda_branches.slot_copier(pools, block_size)(source, target, _claims(*claims))


def _copy_slots_plainly(pools: Sequence[Tensor], source: Tensor, target: Tensor, block_size: int, *claims: Any) -> None:
    branching.slot_copier(pools, block_size)(source, target, _claims(*claims))


def _claims(places: Tensor | None = None, said: Tensor | None = None, tried: Tensor | None = None) -> Claims | None:
    """All three, or none."""
    return None if places is None or said is None or tried is None else Claims(places, said, tried)


writing(
    "plan_cycle",
    "Tensor about, Tensor carried, Tensor(a!) tables, int block_size, int drafts, Tensor(b!) wide, Tensor(c!) narrow, "
    "int branches=1, int first_spare=0",
    cuda_cycle.plan_cycle,
    cycle_plan.plan_cycle,
)
writing(
    "carry_on",
    "Tensor about, Tensor starts, Tensor positions, Tensor drafted, Tensor following, int branches, "
    "Tensor(a!) carried, Tensor(b!) following_rows",
    cuda_cycle.carry_on,
    cycle_plan.carry_on,
)
writing(
    "pending_tokens",
    "Tensor newest, Tensor places, Tensor shortlist, Tensor sources, Tensor(a!) drafted, Tensor(b!) token_ids",
    cuda_cycle.pending_tokens,
    cycle_plan.pending_tokens,
)
returning(
    "nth_best",
    "Tensor logits, Tensor ranks",
    cuda_branches.nth_best,
    branching.nth_best,
    lambda logits, _: logits.new_empty(logits.shape[:1], dtype=torch.int64),
)
writing(
    "copy_slots",
    "Tensor(a!)[] pools, Tensor source, Tensor target, int block_size, Tensor? places=None, Tensor? said=None, "
    "Tensor? tried=None",
    _copy_slots,
    _copy_slots_plainly,
)
returning(
    "draw",
    "Tensor logits, Tensor settings, Tensor numbers, int vocab_size",
    cuda_draw.draw,
    draw_plan.draw,
    lambda logits, *_: (
        logits.new_empty(logits.shape[:1], dtype=torch.int64),
        logits.new_empty((logits.shape[0], NUM_HEAD), dtype=torch.float64),
    ),
    "(Tensor, Tensor)",
)
returning(
    "verify_drawn",
    f"Tensor logits, {_DRAWN}",
    lambda logits, *cycle: cuda_draw.verify_drawn(logits, DrawnCycle(*cycle)),
    lambda logits, *cycle: draw_plan.verify_drawn(logits, DrawnCycle(*cycle)),
    lambda logits, *_: (
        logits.new_empty(logits.shape[:1], dtype=torch.float32),
        logits.new_empty(logits.shape[:1], dtype=torch.int64),
    ),
    "(Tensor, Tensor)",
)
