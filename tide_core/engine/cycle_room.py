"""The indices of a whole cycle in one buffer: those of every draft pass and those of the deep pass behind them.

All but the drafted tokens themselves is known before the cycle begins, so that one transfer brings it to the device.
Rows come by falling number of drafts: those that take part in a draft pass are the first ones. What is left of the
room belongs to no row: its slot is -1 and its context is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tide_core.batch import RowStep

Array = np.ndarray[Any, Any]


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
    def _wide(self) -> dict[str, tuple[int, ...]]:
        """64-bit parts by their shapes."""
        per_draft, per_token = (self.drafts, self.rows), (self.tokens,)
        return {
            "newest": (self.rows,),
            "draft_deep_slots": (self.rows,),
            "draft_positions": per_draft,
            "draft_slots": per_draft,
            "draft_distances": per_draft,
            "positions": per_token,
            "slots": per_token,
            "sources": per_token,
            "kept_slots": per_token,
            "deep_slots": per_token,
            "distances": per_token,
        }

    @property
    def _narrow(self) -> dict[str, tuple[int, ...]]:
        """32-bit parts by their shapes."""
        return {
            "draft_starts": (self.drafts, self.rows + 1),
            "draft_lens": (self.drafts, self.rows),
            "starts": (self.rows + 1,),
            "lens": (self.rows,),
            "tables": (self.rows, self.blocks),
        }

    @property
    def size(self) -> int:
        """In 32-bit numbers."""
        wide, narrow = (sum(map(_volume, part.values())) for part in (self._wide, self._narrow))
        return 2 * wide + narrow

    def split(self, buffer: Any, wide_dtype: Any) -> dict[str, Any]:
        """The parts of a buffer of 32-bit numbers, an array or a tensor, by name."""
        border = 2 * sum(map(_volume, self._wide.values()))
        parts = {}
        for whole, shapes in ((buffer[:border].view(wide_dtype), self._wide), (buffer[border:], self._narrow)):
            end = 0
            for name, shape in shapes.items():
                begin, end = end, end + _volume(shape)
                parts[name] = whole[begin:end].reshape(shape)
        return parts


class CycleIndex:
    """Writes the indices of cycles into the host's side of a buffer."""

    def __init__(self, room: CycleRoom, host: Array, block_size: int) -> None:
        self._room, self._size = room, block_size
        self._parts = room.split(host, np.int64)
        self._ahead = np.arange(room.drafts)[:, None]

    def fill(self, rows: Sequence[RowStep]) -> list[int]:
        """Where the tokens of each row begin in the deep pass."""
        parts, size, num = self._parts, self._size, len(rows)
        start = np.array([row.start for row in rows])
        counts = np.array([row.num_drafts for row in rows])
        tables = parts["tables"]
        for r, (row, used) in enumerate(zip(rows, ((start + counts) // size + 1).tolist(), strict=True)):
            tables[r, :used] = row.table.block_ids[:used]
        parts["newest"][:num] = [row.token_ids[0] for row in rows]
        parts["newest"][num:] = 0
        if self._room.drafts:
            self._fill_drafts(start, counts)
        return self._fill_deep(rows, start, counts)

    def _fill_drafts(self, start: Array, counts: Array) -> None:
        parts, num = self._parts, len(start)
        before = np.maximum(start - 1, 0)
        parts["draft_deep_slots"][:num] = self._slots(np.arange(num), before)
        parts["draft_deep_slots"][num:] = 0
        drafting = self._ahead < counts
        places = np.where(drafting, start + self._ahead, 0)
        for name, values, rest in (
            ("draft_positions", places, 0),
            ("draft_slots", np.where(drafting, self._slots(np.arange(num), places), -1), -1),
            ("draft_distances", np.where(start > 0, self._ahead + 1, 0), 0),
            ("draft_lens", np.where(drafting, places + 1, 0), 0),
        ):
            parts[name][:, :num] = values
            parts[name][:, num:] = rest
        parts["draft_starts"][:] = np.minimum(np.arange(self._room.rows + 1), drafting.sum(1, keepdims=True))

    def _fill_deep(self, rows: Sequence[RowStep], start: Array, counts: Array) -> list[int]:
        parts, num = self._parts, len(start)
        starts, lens = parts["starts"], parts["lens"]
        starts[0] = 0
        np.cumsum(counts + 1, out=starts[1 : num + 1])
        total = int(starts[num])
        starts[num + 1 :] = total
        lens[:num], lens[num:] = start + counts + 1, 0
        row_of = np.repeat(np.arange(num), counts + 1)
        ahead = np.arange(total) - starts[row_of]
        places = start[row_of] + ahead
        slots = self._slots(row_of, places)
        tracked = np.array([row.policy.may_exit for row in rows])
        for name, values, rest in (
            ("positions", places, 0),
            ("slots", slots, -1),
            ("sources", ahead * self._room.rows + row_of, 0),
            ("kept_slots", np.where(tracked[row_of], slots, -1), -1),
            ("deep_slots", self._slots(row_of, np.maximum(places - 1, 0)), 0),
            ("distances", places > 0, 0),
        ):
            parts[name][:total] = values
            parts[name][total:] = rest
        begins: list[int] = starts[:num].tolist()
        return begins

    def _slots(self, rows: Array, places: Array) -> Array:
        """Where positions of rows lie in the pool."""
        blocks = self._parts["tables"][rows, places // self._size].astype(np.int64)
        slots: Array = blocks * self._size + places % self._size
        return slots


def device_parts(room: CycleRoom, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same parts where the passes read them."""
    parts: dict[str, torch.Tensor] = room.split(buffer, torch.int64)
    return parts


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for side in shape:
        volume *= side
    return volume
