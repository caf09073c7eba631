"""Branches: several tokens tried at the first draft, where few rows run.

A deep pass over eight tokens takes little longer on a GPU than one over four. So a row that drafts nearly alone takes
part in a cycle several times: each branch begins with the same newest token, the n-th continues with the token that the
exit ranks n-th, and drafts from there. At full depth at most one branch is right at its first draft, and that one
becomes the row.

A branch has its own K, V and states from the newest token on, in spare blocks at the end of the pool. What lies before
that in the same block is copied there first. If a branch other than the first is right, the cycle copies its slots back
as its last work. The slots are part of the cycle's plan (`tide_core.kernels.reference.cycle`).
"""

from __future__ import annotations

from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import BLOCKS_PER_BRANCH
from tide_core.kv.cache import PagedKV

MAX_BRANCHES = 2
"""The demo model's head has the token first in 0.59 of all cases, and second in 0.11; third and fourth come to 0.08
together, which is less than their tokens cost in the deep pass of an H200."""
MAX_TOKENS = 16
"""Of a deep pass with branches: with more, it takes noticeably longer."""
SPARE_BLOCKS = BLOCKS_PER_BRANCH * (MAX_TOKENS // 2 - 1)
"""For the most branches that are not a row's first, with one draft each."""


def branches_for(num_rows: int, drafts: int, block_size: int) -> int:
    """Branches of each of so many rows."""
    if drafts < 1 or drafts >= block_size:
        return 1
    return max(1, min(MAX_BRANCHES, MAX_TOKENS // (num_rows * (drafts + 1))))


class Branches:
    """The spare blocks, and what copies everything of a token from slot to slot."""

    def __init__(self, cache: PagedKV, kernels: CudaKernels) -> None:
        self.first_spare = cache.num_blocks - SPARE_BLOCKS
        pools = [*(pool for pair in cache.pools for pool in pair), *cache.deep_states]
        self.copy = kernels.slot_copier(pools, cache.block_size)
