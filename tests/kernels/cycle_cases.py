"""Rows of cycles, as the host says them."""

from __future__ import annotations

import numpy as np
import torch

BLOCK_SIZE = 16


def cycle_case(seed: int, num_rows: int, room: int, drafts: int, blocks: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """What is said about rows [4, room], and their blocks [room, blocks]; the first `num_rows` exist."""
    random = np.random.default_rng(seed)
    counts = np.sort(random.integers(0, drafts + 1, num_rows))[::-1]
    counts[: 1 if num_rows else 0] = drafts
    starts = random.integers(0, BLOCK_SIZE * blocks - drafts - 1, num_rows)
    starts[num_rows // 2 : num_rows // 2 + 1] = 0
    about = np.zeros((4, room), dtype=np.int32)
    about[2] = -1
    about[:, :num_rows] = (random.integers(0, 1000, num_rows), starts, counts, random.integers(0, 2, num_rows))
    tables = random.permutation(room * blocks).reshape(room, blocks).astype(np.int32)
    return torch.from_numpy(about), torch.from_numpy(tables)


CASES = [(1, 1, 0), (1, 1, 5), (3, 4, 3), (8, 8, 1), (5, 16, 15), (64, 64, 3), (130, 192, 0), (256, 256, 0), (0, 2, 2)]
"""Rows, room for rows, drafts."""
