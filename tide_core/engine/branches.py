"""Several tokens tried at the first draft, where few rows run: the likeliest, and beside it the ones behind it.

A deep pass over eight tokens takes little longer on a GPU than one over four. So a row that drafts nearly alone takes
part in a cycle several times, as branches: each begins with the same newest token, the n-th one goes on with the token
that the exit ranks n-th, and drafts behind it as ever. At full depth at most one of them can be right at its first
draft, and that one is the row's.

A branch has K, V and states of its own from the newest token on, in spare blocks at the end of the pool. What lies
before that in the same block is copied there first. If a branch but the first is right, what it left is copied back:
the cycle itself does that as its last work, for the device knows first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_core.batch import RowStep
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV

MOST_BRANCHES = 2
"""The demo model's head has the token first in 0.59 of all cases, and second in 0.11; third and fourth come to 0.08
together, which is less than their tokens cost in the deep pass of an H200."""
MOST_TOKENS = 16
"""Of a deep pass with branches: with more, it takes noticeably longer."""
BLOCKS_PER_BRANCH = 2
SPARE_BLOCKS = BLOCKS_PER_BRANCH * (MOST_TOKENS // 2 - 1)
"""The most branches that are not a row's first, with one draft each."""


def branches_for(num_rows: int, drafts: int, block_size: int) -> int:
    """How often each of the rows takes part."""
    if drafts < 1 or drafts >= block_size:
        return 1
    return max(1, min(MOST_BRANCHES, MOST_TOKENS // (num_rows * (drafts + 1))))


class Branches:
    """The spare blocks, and the way there and back."""

    def __init__(self, cache: PagedKV, kernels: CudaKernels) -> None:
        self._size = cache.block_size
        self._first_spare = cache.num_blocks - SPARE_BLOCKS
        self.copy = kernels.slot_copier(
            [*(pool for pair in cache.pools for pool in pair), *cache.deep_states], self._size
        )

    def blocks(self, row: RowStep, branch: int) -> list[int]:
        """The blocks of a row as its branch sees them; branches are counted over all rows, from 0."""
        ids = list(row.table.block_ids)
        spare = self._first_spare + BLOCKS_PER_BRANCH * branch
        for place, index in enumerate(range(*self._own(row))):
            ids[index] = spare + place
        return ids

    def before(self, row: RowStep, blocks: Sequence[int]) -> tuple[int, int, int]:
        """How many slots of the row must be copied into its branch with these blocks, and the first of them here and
        there: what lies before the newest token in its block."""
        block, count = divmod(row.start, self._size)
        return count, row.table.block_ids[block] * self._size, blocks[block] * self._size

    def after(self, row: RowStep, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The slots of the newest token and all drafts in a branch with these blocks, and in the row itself. What lies
        behind the drafts that are right is of no use there, and does no harm."""
        size, own, first = self._size, row.table.block_ids, row.start
        places = [divmod(position, size) for position in range(first, first + row.num_drafts + 1)]
        return [blocks[b] * size + slot for b, slot in places], [own[b] * size + slot for b, slot in places]

    def _own(self, row: RowStep) -> tuple[int, int]:
        """Which of its blocks a branch has for itself."""
        return row.start // self._size, (row.start + row.num_drafts) // self._size + 1
