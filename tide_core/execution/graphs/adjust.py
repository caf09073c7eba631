"""Logit adjustments on the device: bias, fewest tokens and penalties of the rows of a cycle.

Each such row has a slot with its bias entries and the counts of its tokens. A cycle adds the tokens it accepts to the
counts, so that the next one can be launched before the host has read this one. The host writes a slot when it launches
a row from its own state: the first time, and whenever a cycle that was launched ahead was not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tide_core.execution.graphs.cycle_shape import RowPlace
from tide_core.kernels.reference.adjust import IN_PROMPT, MOST_ENTRIES, MOST_OUTPUTS, AdjustState
from tide_core.kernels.reference.cycle import MOST_ROWS
from tide_core.request import MAX_LOGIT_BIAS, Request

ALWAYS = 2**31 - 1


def supports(request: Request) -> bool:
    """Whether the adjustments of a request fit a slot; if not, it takes the plain path."""
    return MAX_LOGIT_BIAS + len(request.end_ids) <= MOST_ENTRIES


class AdjustSlots:
    """The slots of all rows in flight."""

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = MOST_ROWS) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = AdjustState(
            zeros(num_slots, vocab_size, dtype=torch.int16),
            zeros(3, num_slots, dtype=torch.float64),
            zeros(num_slots, MOST_ENTRIES, dtype=torch.int32).fill_(-1),
            zeros(num_slots, MOST_ENTRIES, dtype=torch.float32),
            zeros(num_slots, MOST_ENTRIES, dtype=torch.int32),
        )
        self._slots: dict[int, tuple[Request, int]] = {}
        self._num_slots, self._vocab_size = num_slots, vocab_size

    def place(self, rows: Sequence[RowPlace]) -> list[int]:
        """The slot of each row, -1 for rows without adjustments. Writes the slots of rows that the host places."""
        mine = {id(row.step.request) for row in rows}
        slots = [-1] * len(rows)
        for number, row in enumerate(rows):
            request = row.step.request
            if not request.adjusts_logits:
                continue
            known = self._slots.get(id(request))
            slot = self._free_slot(mine) if known is None else known[1]
            self._slots[id(request)] = request, slot
            if known is None or row.previous < 0:
                self._write(slot, request, row.step.output_ids)
            slots[number] = slot
        return slots

    def _free_slot(self, used: set[int]) -> int:
        """One that no row of this launch uses: those of rows that ended are free again."""
        if len(self._slots) < self._num_slots:
            return next(iter(set(range(self._num_slots)) - {slot for _, slot in self._slots.values()}))
        oldest = next(key for key in self._slots if key not in used)
        return self._slots.pop(oldest)[1]

    def _write(self, slot: int, request: Request, output_ids: Sequence[int]) -> None:
        params, state = request.params, self.state
        counts = np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=self._vocab_size)
        counts = np.minimum(counts, MOST_OUTPUTS).astype(np.int16)
        counts[np.asarray(request.prompt_ids, dtype=np.int64)] |= np.int16(IN_PROMPT)
        entries: list[tuple[int, float, int]] = [(i, value, ALWAYS) for i, value in params.logit_bias.items()]
        if params.min_tokens:
            entries += [(i, -np.inf, params.min_tokens) for i in sorted(request.end_ids)]
        entries += [(-1, 0.0, 0)] * (len(entries) < MOST_ENTRIES)
        ids, values, until = zip(*entries, strict=True)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._copy(state.counts[slot], counts)
        self._copy(state.penalties[:, slot], np.array(penalties, dtype=np.float64))
        self._copy(state.entry_ids[slot, : len(ids)], np.array(ids, dtype=np.int32))
        self._copy(state.entry_values[slot, : len(ids)], np.array(values, dtype=np.float32))
        self._copy(state.entry_until[slot, : len(ids)], np.array(until, dtype=np.int32))

    @staticmethod
    def _copy(to: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        source = torch.from_numpy(values)
        # A copy from pageable memory would wait for all that the device has to do.
        to.copy_(source.pin_memory() if to.is_cuda else source, non_blocking=True)
