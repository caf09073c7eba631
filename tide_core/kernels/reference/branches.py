"""Ops for branches of a draft, in plain Torch: see `tide_core.execution.graphs.branches`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Claims(NamedTuple):
    """A condition for each of N pairs of slots: a token of full depth equals a drafted token."""

    places: Tensor
    """[2, N] int32: in `target_ids`, and in `draft_ids`. They must exist."""
    target_ids: Tensor
    """[S] int64"""
    draft_ids: Tensor
    """[R] int64"""


class CopySlots(Protocol):
    """What lies in slots `source` [N] of every pool goes to slots `target` [N], int32; a pair with a negative slot is
    skipped, and with `claims` one whose claim is not true."""

    def __call__(self, source: Tensor, target: Tensor, claims: Claims | None = None) -> None: ...


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

    def copy(source: Tensor, target: Tensor, claims: Claims | None = None) -> None:
        both = torch.stack((source, target)).long()
        wanted = (both >= 0).all(0)
        if claims is not None:
            target_at, draft_at = claims.places.long()
            wanted &= claims.target_ids[target_at] == claims.draft_ids[draft_at]
        source, target = both[:, wanted]
        for pool in as_blocks:
            taken = pool[source // block_size, :, source % block_size].clone()
            pool[target // block_size, :, target % block_size] = taken

    return copy
