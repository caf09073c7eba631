"""What branches of a draft need, in plain Torch: see `tide_core.engine.branches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CopySlots = Callable[[Tensor, Tensor], None]
"""What lies in slots `from` [N] of every pool goes to slots `to` [N], int32; a pair with a negative slot is skipped."""


def nth_best(logits: Tensor, ranks: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Where in each row of `logits` [R, V] the number stands that `ranks` [R], int32, others are before: larger ones,
    and equal ones at lower places. A NaN is larger than every number."""
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    found = order.gather(-1, ranks.long().unsqueeze(-1)).squeeze(-1)
    return found if out is None else out.copy_(found)


def slot_copier(pools: Sequence[Tensor], block_size: int) -> CopySlots:
    """For these pools, [blocks, heads, block size, D] or [slots, D] each."""
    kept = [pool for pool in pools if pool.numel()]
    as_blocks = [pool if pool.dim() == 4 else pool.view(-1, 1, block_size, pool.shape[-1]) for pool in kept]

    def copy(source: Tensor, target: Tensor) -> None:
        both = torch.stack((source, target)).long()
        source, target = both[:, (both >= 0).all(0)]
        for pool in as_blocks:
            taken = pool[source // block_size, :, source % block_size].clone()
            pool[target // block_size, :, target % block_size] = taken

    return copy
