"""What the host says of the rows of a cycle: one small buffer, from which the device makes all indices itself.

Where rows draw at random, the buffer begins with the numbers of `cycle_draws`: they are the ones with 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tide_core.batch import RowStep
from tide_core.execution.graphs.draw_numbers import DrawNumbers, fill_numbers, num_numbers, split_numbers
from tide_core.kernels.reference.cycle import FOR_GOOD, IF_RIGHT, NEVER
from tide_core.request import ExitPolicy

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
    remembers: bool = False
    """Whether any of the rows may exit, so that exits keep something of the tokens."""
    draws: bool = False
    """Whether any of the rows draws at random. Then there are no branches."""

    @property
    def tokens(self) -> int:
        """Of the deep pass."""
        return self.rows * (self.drafts + 1)

    @property
    def size(self) -> int:
        """Of the buffer, in 32-bit numbers."""
        return self._begin + self.rows * (4 + self.blocks)

    def split(self, buffer: Any) -> tuple[Any, Any]:
        """Of an array or a tensor: what is said about the rows [4, R], and their blocks [R, B]."""
        border = self._begin + 4 * self.rows
        about, tables = buffer[self._begin : border], buffer[border:]
        return about.reshape(4, self.rows), tables.reshape(self.rows, self.blocks)

    def numbers(self, buffer: Any, float64: Any) -> DrawNumbers:
        """How the rows draw; of an array or a tensor, whose own type of 64 bits is named."""
        return split_numbers(buffer[: self._begin].view(float64), self.rows, self.drafts)

    @property
    def _begin(self) -> int:
        return 2 * num_numbers(self.rows, self.drafts) if self.draws else 0


class RowPlace(NamedTuple):
    """A row as a cycle is told of it."""

    step: RowStep
    """Of this cycle, or of the one before it: then it is not known yet with which token it will go on, and where."""
    drafts: int
    blocks: list[int]
    """All that it may need."""
    behind: int = -1
    """Its place in the cycle before, where it goes on as that one leaves it; -1: as its step says."""


class CycleRows:
    """Writes rows into the host's side of a buffer, which keeps what nobody has changed since."""

    def __init__(self, room: CycleRoom, host: Array) -> None:
        self._about, self._tables = room.split(host)
        self._each = room.branches
        self._numbers = room.numbers(host, np.float64) if room.draws else None
        self._about[:] = NO_ROW
        self._num_rows = 0
        self._written: list[list[int]] = [[] for _ in range(room.rows)]
        """What stands in the tables: most rows are the same as in the step before."""

    def fill(self, rows: Sequence[RowPlace]) -> list[int]:
        """By falling number of drafts. Returns where the tokens of each place begin in the deep pass."""
        each, written = self._each, self._written
        about: list[tuple[int, int, int, int]] = []
        place = 0
        for step, drafts, blocks, behind in rows:
            start = step.table.num_valid if behind < 0 else -1 - behind
            of_row = step.token_ids[0], start, drafts, leaves(step.policy)
            for _ in range(each):
                if written[place] != blocks:  # a few times quicker than to write them again
                    self._tables[place, : len(blocks)] = written[place] = blocks
                about.append(of_row)
                place += 1
        num, before = len(about), self._num_rows
        if about:
            self._about[:, :num] = np.array(about, dtype=np.int32).T
        if num < before:
            self._about[:, num:before] = NO_ROW
        self._num_rows = num
        if self._numbers is not None:
            fill_numbers(self._numbers, [row.step for row in rows])
        return [0, *accumulate([drafts + 1 for _, _, drafts, _ in about[:-1]])]


def leaves(policy: ExitPolicy) -> int:
    """How a row of this policy may leave early, as `cycle_plan` has it."""
    if not policy.may_exit:
        return NEVER
    return IF_RIGHT if policy.exit_thresholds[0] > 1.0 else FOR_GOOD
