"""States of the teacher that stay on the device, so that a sequence runs through the frozen model once.

In a wide model the teacher's pass is half of a training step, and every epoch sees the same sequences. As many
sequences as there is memory for are kept with their states at the layers that heads read and after the last layer; of
a batch only the others run through the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tide_core.calibration.collect.shards import SequenceBatch
from tide_core.calibration.train.teacher import States, Teacher

ROOM = 0.9
"""Share of the free memory that may be taken."""
NEEDED = 1.5
"""Memory that a step takes and gives back, as a multiple of what the first steps took: later batches may be larger."""
STAGED = 1.5
"""Positions that a padded batch may have, as a multiple of the tokens of a batch."""


class KeptStates:
    """States of padded batches [B, S, D]. Those of all batches of a shape lie at one place, until the next batch."""

    def __init__(self, teacher: Teacher, layers: Sequence[int], batch_tokens: int) -> None:
        self._teacher, self._layers = teacher, (*layers, teacher.num_layers)
        self._width = int(teacher.adapter.config.hidden_size)
        self._dtype, self._device = teacher.adapter.dtype, teacher.adapter.device
        self._staged = self._empty(int(STAGED * batch_tokens))
        self._stored = self._empty(0)
        self._begins: dict[int, int] = {}
        """First row of a sequence in the store, by its number."""
        self._num_rows = 0

    @property
    def bytes_per_token(self) -> int:
        return len(self._layers) * self._width * self._dtype.itemsize

    @property
    def num_tokens(self) -> int:
        """That are kept."""
        return self._num_rows

    def keep(self, num_tokens: int) -> None:
        """From now on keep the states of that many tokens."""
        self._stored = self._empty(num_tokens)
        self._begins, self._num_rows = {}, 0

    def supports(self, tokens: Tensor) -> bool:
        """Whether a padded batch is small enough. One sequence may be longer than the tokens of a batch."""
        return tokens.numel() <= self._staged.shape[1]

    def states(self, batch: SequenceBatch, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of a batch whose tokens [B, S] may be padded further: one [B, S, D] for each layer. Those of padding have no
        meaning."""
        num_rows, length = tokens.shape
        size, numbers = num_rows * length, batch.indices.tolist()
        missing = [row for row, number in enumerate(numbers) if number not in self._begins]
        staged = self._staged[:, :size]
        if len(missing) < len(numbers):
            places = self._places(batch, num_rows, length)
            for mine, stored in zip(staged, self._stored, strict=True):
                torch.index_select(stored, 0, places, out=mine)
        if missing:
            rows = self._moved(torch.tensor(missing))
            seen = self._teacher.run(self._moved(tokens[missing]), self._layers[:-1])
            for mine, layer in zip(staged, self._layers, strict=True):
                found = seen.last if layer == self._layers[-1] else seen.at[layer]
                mine.view(num_rows, length, -1).index_copy_(0, rows, found)
            for row in missing:
                self._store(numbers[row], staged[:, row * length : row * length + int(batch.lengths[row])])
        return tuple(each.view(num_rows, length, -1) for each in staged)

    def complete(self, seen: Sequence[Tensor]) -> States:
        """What the teacher returns for a batch with these states."""
        *others, last = seen
        return States(dict(zip(self._layers, others, strict=False)), last, self._teacher.final_norm(last))

    def _places(self, batch: SequenceBatch, num_rows: int, length: int) -> Tensor:
        """[B * S] rows of the store, of kept sequences; 0 for others and for padding."""
        begins = torch.zeros(num_rows, dtype=torch.long)
        begins[: len(batch.indices)] = torch.tensor([self._begins.get(number, 0) for number in batch.indices.tolist()])
        ends = torch.zeros(num_rows, dtype=torch.long)
        ends[: len(batch.indices)] = batch.lengths
        at = torch.arange(length)
        rows = torch.where(at < ends[:, None], begins[:, None] + at, 0).flatten()
        return self._moved(rows.clamp(max=max(0, self._num_rows - 1)))

    def _store(self, number: int, states: Tensor) -> None:
        """[layers, tokens, D] of one sequence, if there is room."""
        end = self._num_rows + states.shape[1]
        if end <= self._stored.shape[1]:
            self._stored[:, self._num_rows : end] = states
            self._begins[number], self._num_rows = self._num_rows, end

    def _empty(self, num_tokens: int) -> Tensor:
        return torch.empty(len(self._layers), num_tokens, self._width, dtype=self._dtype, device=self._device)

    def _moved(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values


def tokens_that_fit(kept: KeptStates, device: torch.device, num_tokens: int) -> int:
    """How many of the tokens of a training a device has memory for, after its first steps, since whose beginning peaks
    of memory are counted. On a CPU none: there the teacher is the smaller part of a step."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # else what steps took and gave back counts as taken; that of graphs stays theirs
    free, _ = torch.cuda.mem_get_info(device)
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    room = ROOM * free - NEEDED * needed
    return max(0, min(num_tokens, int(room / kept.bytes_per_token)))
