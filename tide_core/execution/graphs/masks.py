"""Grammars in a cycle: which tokens may follow each token of the deep pass.

The host follows grammars, and what may follow a draft depends on all drafts before it. So a cycle with such rows has
three stages: drafts, the deep pass, and the choice of tokens. What may follow the newest token is known before the
first stage. While the second one runs, the host reads the drafts and computes the masks of the third.

A draft that the grammar does not allow is not prevented, except the first of a greedy row: no mask lets full depth
agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace

WORD = 32
ALL = -1
"""A word that allows all of its tokens."""


class MaskBuffer:
    """The masks of one shape, a bit for every token of the vocabulary, on the host and on the device."""

    def __init__(self, shape: CycleShape, vocab_size: int, shortlist: torch.Tensor) -> None:
        device = shortlist.device
        on_gpu = device.type == "cuda"
        words = -(-vocab_size // WORD)
        self._host = torch.full((shape.tokens, words), ALL, dtype=torch.int32, pin_memory=on_gpu)
        self._device = self._host.to(device)
        self._array = self._host.numpy()
        self._written: list[int] = []
        """Tokens of the deep pass whose masks do not allow all."""
        self._columns = _places(torch.arange(vocab_size, device=device))
        self._short_columns = _places(shortlist)
        self._drafted = torch.zeros((shape.drafts, shape.rows), dtype=torch.int64, pin_memory=on_gpu)
        self._fetched: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send_first(self, rows: Sequence[RowPlace], begins: Sequence[int]) -> None:
        """Masks of the first drafts of greedy rows. The exit of a sampled row may draw anything: a row of logits
        without any token would have no distribution."""
        self._array[self._written] = ALL
        self._written = []
        for row, begin in zip(rows, begins, strict=True):
            request = row.step.request
            if request.mask is not None and row.drafts and request.params.is_greedy:
                self._write(begin, request.mask.bits(row.step.output_ids))
        self._send()

    def fetch(self, drafted: torch.Tensor) -> None:
        """Copy the drafts [K, R] to the host once they are made."""
        self._drafted.copy_(drafted, non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()

    def send_all(self, rows: Sequence[RowPlace], begins: Sequence[int]) -> None:
        """Masks after the newest token and after every draft that the grammar allows."""
        if self._fetched is not None:
            self._fetched.synchronize()
        drafted = self._drafted.tolist()
        for place, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            request = row.step.request
            if request.mask is None:
                continue
            output_ids = list(row.step.output_ids)
            for distance in range(row.drafts + 1):
                bits = request.mask.bits(output_ids)
                self._write(begin + distance, bits)
                draft = drafted[distance][place] if distance < row.drafts else -1
                if draft < 0 or draft in request.end_ids or not bits[draft // WORD] >> draft % WORD & 1:
                    break
                output_ids.append(draft)
        self._send()

    def apply_first(self, logits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Logits of the first drafts [R, S]; `starts`: where the tokens of each row begin in the deep pass."""
        words = self._device.index_select(0, starts[: len(logits)].long())
        return _masked(logits, words, *self._short_columns)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the deep pass [T, V]."""
        return _masked(logits, self._device, *self._columns)

    def _write(self, token: int, bits: Any) -> None:
        self._array[token] = bits
        self._written.append(token)

    def _send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


def _places(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Word and bit of each token."""
    return ids // WORD, (ids % WORD).int()


def _masked(logits: torch.Tensor, words: torch.Tensor, at: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    allowed = words.index_select(1, at).bitwise_right_shift_(shifts).bitwise_and_(1)
    return logits.masked_fill(allowed == 0, -torch.inf)
