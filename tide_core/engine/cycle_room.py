"""What the host says of the rows of a cycle: one small buffer, from which the device makes all indices itself.

Where rows draw at random, the buffer begins with the numbers of `cycle_draws`: they are the ones with 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tide_core.batch import RowStep
from tide_core.engine.branches import Branches
from tide_core.engine.cycle_draws import DrawNumbers, fill_numbers, num_numbers, split_numbers

Array = np.ndarray[Any, Any]
NO_ROW = ((0,), (0,), (-1,), (0,))
"""What is said of a place without a row."""


@dataclass(frozen=True, slots=True)
class CycleRoom:
    """What there is room for: rows, drafts of each, blocks of each. Every row may be there in several branches, each of
    which counts as a row."""

    rows: int
    drafts: int
    blocks: int
    branches: int = 1
    block_size: int = 0
    """Where there are branches."""
    draws: bool = False
    """Whether any of the rows draws at random. Then there are no branches."""

    @property
    def tokens(self) -> int:
        """Of the deep pass."""
        return self.rows * (self.drafts + 1)

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        copies = self.rows * self.block_size if self.branches > 1 else 0
        return (4, self.rows), (self.rows, self.blocks), (int(self.branches > 1), self.rows), (2, copies)

    @property
    def size(self) -> int:
        """Of the buffer, in 32-bit numbers."""
        return self._begin + sum(height * width for height, width in self._shapes)

    def split(self, buffer: Any) -> tuple[Any, Any, Any, Any]:
        """Of an array or a tensor: what is said about the rows [4, R], their blocks [R, B], and with branches the rank
        of each [1, R] and the slots to copy from and to [2, N]."""
        parts, end = [], self._begin
        for height, width in self._shapes:
            begin, end = end, end + height * width
            parts.append(buffer[begin:end].reshape(height, width))
        about, tables, ranks, copies = parts
        return about, tables, ranks, copies

    def numbers(self, buffer: Any, float64: Any) -> DrawNumbers:
        """How the rows draw; of an array or a tensor, whose own type of 64 bits is named."""
        return split_numbers(buffer[: self._begin].view(float64), self.rows, self.drafts)

    @property
    def _begin(self) -> int:
        return 2 * num_numbers(self.rows, self.drafts) if self.draws else 0


class CycleRows:
    """Writes rows into the host's side of a buffer, which keeps what nobody has changed since."""

    def __init__(self, room: CycleRoom, host: Array, block_size: int, branches: Branches | None = None) -> None:
        self._about, self._tables, self._ranks, self._copies = room.split(host)
        self._block_size, self._room, self._branches = block_size, room, branches
        self._numbers = room.numbers(host, np.float64) if room.draws else None
        self.blocks: list[list[int]] = []
        """Of every branch that is not the first of its row."""
        self._about[:] = NO_ROW
        self._copies[:] = -1
        self._num_rows = self._num_copies = 0
        self._written: list[list[int]] = [[] for _ in range(room.rows)]
        """What stands in the tables of the first branches: most rows are the same as in the step before."""
        if room.branches > 1:
            self._ranks[0] = np.arange(room.rows) % room.branches
        self._offsets = np.arange(block_size, dtype=np.int32)

    def fill(self, rows: Sequence[RowStep]) -> list[int]:
        """By falling number of drafts. Returns where the tokens of each row begin in the deep pass."""
        size, each, written = self._block_size, self._room.branches, self._written
        about: list[tuple[int, int, int, bool]] = []
        for place, row in enumerate(rows):
            table, count = row.table, row.num_drafts
            start = table.lengths[-1]
            used = (start + count) // size + 1
            blocks = table.block_ids[:used]
            if written[place] != blocks:  # a few times quicker than to write them again
                self._tables[place * each, :used] = written[place] = blocks
            about += ((row.token_ids[0], start, count, row.policy.may_exit),) * each
        num, before = len(about), self._num_rows
        if about:
            self._about[:, :num] = np.array(about, dtype=np.int32).T
        if num < before:
            self._about[:, num:before] = NO_ROW
        self._num_rows = num
        if each > 1:
            self._branch_off(rows)
        if self._numbers is not None:
            fill_numbers(self._numbers, rows)
        return [0, *accumulate([count + 1 for _, _, count, _ in about[:-1]])]

    def _branch_off(self, rows: Sequence[RowStep]) -> None:
        """Give every branch but the first of each row blocks of its own."""
        branches, each, size = self._branches, self._room.branches, self._block_size
        assert branches is not None
        self.blocks = []
        end = 0
        for place, row in enumerate(rows):
            used = (row.start + row.num_drafts) // size + 1
            for rank in range(1, each):
                blocks = branches.blocks(row, len(self.blocks))
                self.blocks.append(blocks)
                self._tables[place * each + rank, :used] = blocks[:used]
                count, source, target = branches.before(row, blocks)
                begin, end = end, end + count
                self._copies[0, begin:end] = self._offsets[:count] + source
                self._copies[1, begin:end] = self._offsets[:count] + target
        if end < self._num_copies:
            self._copies[:, end : self._num_copies] = -1
        self._num_copies = end
