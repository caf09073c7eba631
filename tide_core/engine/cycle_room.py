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
        several = int(self.branches > 1)
        copies, returns = several * self.rows * self.block_size, several * self.tokens
        return (4, self.rows), (self.rows, self.blocks), (several, self.rows), (2, copies), (4, returns)

    @property
    def size(self) -> int:
        """Of the buffer, in 32-bit numbers."""
        return self._begin + sum(height * width for height, width in self._shapes)

    def split(self, buffer: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Of an array or a tensor: what is said about the rows [4, R], their blocks [R, B], and with branches the rank
        of each [1, R], the slots to copy from and to [2, N], and those to copy back from and to if a branch is right:
        [4, M], with where it is said what follows the newest token, and where the branch has tried a token."""
        parts, end = [], self._begin
        for height, width in self._shapes:
            begin, end = end, end + height * width
            parts.append(buffer[begin:end].reshape(height, width))
        about, tables, ranks, copies, returns = parts
        return about, tables, ranks, copies, returns

    def numbers(self, buffer: Any, float64: Any) -> DrawNumbers:
        """How the rows draw; of an array or a tensor, whose own type of 64 bits is named."""
        return split_numbers(buffer[: self._begin].view(float64), self.rows, self.drafts)

    @property
    def _begin(self) -> int:
        return 2 * num_numbers(self.rows, self.drafts) if self.draws else 0


class CycleRows:
    """Writes rows into the host's side of a buffer, which keeps what nobody has changed since."""

    def __init__(self, room: CycleRoom, host: Array, block_size: int, branches: Branches | None = None) -> None:
        self._about, self._tables, self._ranks, self._copies, self._returns = room.split(host)
        self._block_size, self._room, self._branches = block_size, room, branches
        self._numbers = room.numbers(host, np.float64) if room.draws else None
        self._about[:] = NO_ROW
        self._copies[:] = self._returns[:2] = -1
        self._num_rows = self._num_copies = self._num_returns = 0
        self._written: list[list[int]] = [[] for _ in range(room.rows)]
        """What stands in the tables: most rows are the same as in the step before."""
        if room.branches > 1:
            self._ranks[0] = np.arange(room.rows) % room.branches
        self._offsets = np.arange(block_size, dtype=np.int32)

    def fill(self, rows: Sequence[RowStep]) -> list[int]:
        """By falling number of drafts. Returns where the tokens of each row begin in the deep pass."""
        size, each, written = self._block_size, self._room.branches, self._written
        about: list[tuple[int, int, int, bool]] = []
        for place, row in enumerate(rows):
            table, count = row.table, row.num_drafts
            start = table.num_valid
            used = (start + count) // size + 1
            blocks = table.block_ids[:used]
            first = place * each
            if written[first] != blocks:  # a few times quicker than to write them again
                self._tables[first, :used] = written[first] = blocks
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
        branches, each, size, written = self._branches, self._room.branches, self._block_size, self._written
        assert branches is not None
        returns: list[list[int]] = [[], [], [], []]
        end = num = 0
        for place, row in enumerate(rows):
            first, count = place * each, row.num_drafts + 1
            used = (row.start + count - 1) // size + 1
            for branch in range(first + 1, first + each):
                blocks = branches.blocks(row, num)
                num += 1
                if written[branch] != blocks[:used]:
                    self._tables[branch, :used] = written[branch] = blocks[:used]
                before, source, target = branches.before(row, blocks)
                begin, end = end, end + before
                np.add(self._offsets[:before], source, out=self._copies[0, begin:end])
                np.add(self._offsets[:before], target, out=self._copies[1, begin:end])
                if row.policy.exit_thresholds[0] > 1.0:  # a token that leaves for good is the likeliest
                    back = *branches.after(row, blocks), [first * count] * count, [branch] * count
                    for part, more in zip(returns, back, strict=True):
                        part += more
        num_returns = len(returns[0])
        self._returns[:, :num_returns] = returns
        if num_returns < self._num_returns:
            self._returns[:2, num_returns : self._num_returns] = -1
        if end < self._num_copies:
            self._copies[:, end : self._num_copies] = -1
        self._num_copies, self._num_returns = end, num_returns
