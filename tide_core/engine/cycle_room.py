"""What the host says of the rows of a cycle: one small buffer, from which the device makes all indices itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tide_core.batch import RowStep


@dataclass(frozen=True, slots=True)
class CycleRoom:
    """What there is room for: rows, drafts of each, blocks of each."""

    rows: int
    drafts: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Of the deep pass."""
        return self.rows * (self.drafts + 1)

    @property
    def size(self) -> int:
        """Of the buffer, in 32-bit numbers: four of every row, and its blocks."""
        return self.rows * (4 + self.blocks)

    def split(self, buffer: Any) -> tuple[Any, Any]:
        """What is said about the rows [4, R], and their blocks [R, B]; of an array or a tensor."""
        border = 4 * self.rows
        return buffer[:border].reshape(4, self.rows), buffer[border:].reshape(self.rows, self.blocks)


class CycleRows:
    """Writes rows into the host's side of a buffer."""

    def __init__(self, room: CycleRoom, host: np.ndarray[Any, Any], block_size: int) -> None:
        self._about, self._tables = room.split(host)
        self._block_size = block_size

    def fill(self, rows: Sequence[RowStep]) -> list[int]:
        """By falling number of drafts. Returns where the tokens of each row begin in the deep pass."""
        num, size = len(rows), self._block_size
        drafts = [row.num_drafts for row in rows]
        starts = [row.table.num_valid for row in rows]
        self._about[:, :num] = (
            [row.token_ids[0] for row in rows],
            starts,
            drafts,
            [row.policy.may_exit for row in rows],
        )
        self._about[:, num:] = ((0,), (0,), (-1,), (0,))
        for place, (row, start, count) in enumerate(zip(rows, starts, drafts, strict=True)):
            used = (start + count) // size + 1
            self._tables[place, :used] = row.table.block_ids[:used]
        return [0, *accumulate(count + 1 for count in drafts[:-1])]
