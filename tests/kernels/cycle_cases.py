"""Rows of cycles, as the host launches them."""

from __future__ import annotations

import numpy as np
import torch

BLOCK_SIZE = 16


def cycle_case(
    seed: int, num_rows: int, places: int, drafts: int, blocks: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """The metadata of rows [5, places], and their blocks [places, blocks]; the first `num_rows` exist."""
    random = np.random.default_rng(seed)
    counts = np.sort(random.integers(0, drafts + 1, num_rows))[::-1]
    counts[: 1 if num_rows else 0] = drafts
    starts = random.integers(0, BLOCK_SIZE * blocks - drafts - 1, num_rows)
    starts[num_rows // 2 : num_rows // 2 + 1] = 0
    row_meta = np.zeros((5, places), dtype=np.int32)
    row_meta[2] = -1
    row_meta[:4, :num_rows] = (random.integers(0, 1000, num_rows), starts, counts, random.integers(0, 2, num_rows))
    row_meta[4, :num_rows] = starts + random.integers(1, 8, num_rows)  # some answers end within the cycle
    tables = random.permutation(places * blocks).reshape(places, blocks).astype(np.int32)
    return torch.from_numpy(row_meta), torch.from_numpy(tables)


def branched_case(
    seed: int, num_rows: int, drafts: int, branches: int, blocks: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows with as many branches each, all with as many drafts; spare blocks are those from 900 on."""
    row_meta, tables = cycle_case(seed, num_rows, num_rows, drafts, blocks)
    row_meta[2] = drafts
    row_meta[3] = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, num_rows))
    return row_meta.repeat_interleave(branches, 1), tables.repeat_interleave(branches, 0)


def no_row_carried(seed: int = 0) -> torch.Tensor:
    """What the cycle before left, of no matter to rows that are told what they are."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 100, (3, 256)).astype(np.int32))


def carried_case(seed: int, row_meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows, every other one as the cycle before left it, and the state that it left."""
    next_state, told = no_row_carried(seed), row_meta.clone()
    places = np.random.default_rng(seed).permutation(256)
    for r in range(0, row_meta.shape[1], 2):
        if row_meta[2, r] >= 0:
            next_state[:2, places[r]] = row_meta[:2, r]
            told[:2, r] = torch.tensor([0, -1 - places[r]])
    return told, next_state


BRANCHED = [(1, 1, 2), (1, 3, 2), (1, 15, 2), (2, 3, 2), (3, 1, 4), (4, 1, 2)]
"""Rows, drafts, branches."""
CASES = [(1, 1, 0), (1, 1, 5), (3, 4, 3), (8, 8, 1), (5, 16, 15), (64, 64, 3), (130, 192, 0), (256, 256, 0), (0, 2, 2)]
"""Rows, places for rows, drafts."""
