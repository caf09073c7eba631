"""The outputs of a cycle: written by its passes on the device, and copied to the host in one transfer."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch

from tide_core.batch import TokenNote
from tide_core.kernels.reference.ops import Top2

Array = np.ndarray[Any, Any]


class TopLogprobs(NamedTuple):
    """After every token of the deep pass: the likeliest tokens, best first, and the log-probability of the one that
    follows. Views of the host buffer: they hold until the next launch."""

    ids: Array
    """[T, N]"""
    logprobs: Array
    """[T, N]"""
    chosen: Array
    """[T]"""

    def notes(self, begin: int, end: int, num: int) -> list[TokenNote]:
        """Of some tokens; tokens that the model rules out are not listed."""
        listed = self.ids[begin:end, :num].tolist(), self.logprobs[begin:end, :num].tolist()
        notes = []
        for chosen, ids, logprobs in zip(self.chosen[begin:end].tolist(), *listed, strict=True):
            pairs = tuple(zip(ids, logprobs, strict=True))
            if pairs and pairs[-1][1] == -inf:
                pairs = tuple([pair for pair in pairs if pair[1] > -inf])
            notes.append(TokenNote(chosen, pairs))
        return notes


class CycleOutput(NamedTuple):
    """With K drafts of R rows, and T tokens of the deep pass."""

    drafted: list[list[int]]
    """[K][R] token ids."""
    following: tuple[int, ...]
    """[T] the token after each token of the deep pass: at full depth, or the draft that a budget kept instead. A draft
    is accepted if it equals this token; for sampled rows the rejection rule has decided that."""
    next_state: list[list[int]]
    """[2][R] the token each row continues with, and its position: drafts before it are accepted."""
    scores: list[list[float]]
    """[K][R] of the drafts."""
    best: list[float]
    """[T] the largest logits at full depth."""
    gaps: Array
    """[T] of rows with a budget: the gap of a draft that it kept, negative for all other tokens. A view, as in
    `TopLogprobs`."""
    top: TopLogprobs | None = None
    """Where log-probabilities are wanted."""

    def is_finite(self, num_rows: int, num_tokens: int) -> bool:
        """Whether all numbers of the first rows and tokens are finite; checked all at once."""
        return isfinite(sum(self.best[:num_tokens])) and all([isfinite(sum(row[:num_rows])) for row in self.scores])


class OutputBuffer:
    """The tensors of a `CycleOutput`, and those that stay on the device."""

    def __init__(self, rows: int, drafts: int, device: torch.device, num_logprobs: int = 0) -> None:
        """`num_logprobs`: how many of the likeliest tokens are reported; 0 for none."""
        tokens, self._shape, self._num_logprobs = rows * (drafts + 1), (drafts, rows), num_logprobs
        top = 12 * tokens * num_logprobs + (4 * tokens if num_logprobs else 0)
        self._size = 12 * drafts * rows + 16 * (tokens + rows) + top
        self._device = torch.zeros(self._size, dtype=torch.uint8, device=device)
        self.drafted, self.following, self.next_state, self.scores, self.best, self.gaps, *self.top = self._split(
            self._device
        )
        self.places = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """Indices of the drafts in the shortlist."""
        self._top2 = [torch.zeros(self._shape, device=device) for _ in range(3)]
        self._unused = torch.zeros(rows, dtype=torch.int64, device=device)
        self._deep = [torch.zeros(tokens, device=device) for _ in range(2)]
        self.token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Of the deep pass."""

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        (drafts, rows), num = self._shape, self._num_logprobs
        count, tokens = drafts * rows, rows * (drafts + 1)
        border = 8 * (count + tokens + 2 * rows + tokens * num)
        wide, narrow = buffer[:border].view(torch.int64), buffer[border:].view(torch.float32)
        sizes = [count, tokens, 2 * rows, tokens * num]
        drafted, following, next_state, top_ids = torch.split(wide, sizes)
        sizes = [count, tokens, tokens, tokens * num, tokens if num else 0]
        scores, best, gaps, top, chosen = torch.split(narrow, sizes)
        parts = [drafted.view(self._shape), following, next_state.view(2, rows), scores.view(self._shape), best, gaps]
        return [*parts, top_ids.view(tokens, num), top.view(tokens, num), chosen] if num else parts

    def top2_of(self, distance: int) -> Top2:
        """Where the top two values and the sum of one draft pass go. Their index is not used: `choice` decides."""
        best, second, total = (part[distance] for part in self._top2)
        return Top2(best, self._unused, second, total)

    @property
    def all_top2(self) -> Top2:
        """Of all draft passes, one after another."""
        best, second, total = (part.flatten() for part in self._top2)
        return Top2(best, self.places.flatten(), second, total)

    @property
    def deep_top2(self) -> Top2:
        """Where those of the deep pass go."""
        return Top2(self.best, self.following, *self._deep)

    def host_copy(self) -> HostCopy:
        """Pinned memory on the host for one output."""
        host = torch.zeros(self._size, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        return HostCopy(host, self._split(host))

    def send(self, to: HostCopy) -> None:
        to.host.copy_(self._device, non_blocking=True)


class HostCopy:
    """One output on the host."""

    def __init__(self, host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.host = host
        self._parts = [part.numpy() for part in parts]

    def read(self) -> CycleOutput:
        """Once the copy is done."""
        drafted, following, next_state, scores, best = (part.tolist() for part in self._parts[:5])
        gaps, *top = self._parts[5:]
        numbers = drafted, tuple(following), next_state, scores, best, gaps
        return CycleOutput(*numbers, TopLogprobs(*top) if top else None)
