"""What a cycle says: filled in by its passes on the device, and brought to the host in one transfer."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import torch

from tide_core.kernels.reference.ops import Peaks


class Said(NamedTuple):
    """With K drafts of R rows, and T tokens of the deep pass."""

    drafted: list[list[int]]
    """[K][R] token ids."""
    following: tuple[int, ...]
    """[T] the tokens that follow those of the deep pass."""
    going_on: list[list[int]]
    """[2][R] the token that each row goes on with, and its position."""
    scores: list[list[float]]
    """[K][R] of the drafts."""
    best: list[float]
    """[T] the largest logits at full depth."""

    def is_finite(self, num_rows: int, num_tokens: int) -> bool:
        """Whether all numbers of the first so many are, as nearly always: looked at all at once."""
        return isfinite(sum(self.best[:num_tokens])) and all([isfinite(sum(row[:num_rows])) for row in self.scores])


class CycleSaid:
    """The tensors behind it, and what stays on the device."""

    def __init__(self, rows: int, drafts: int, device: torch.device) -> None:
        tokens, self._shape = rows * (drafts + 1), (drafts, rows)
        self._size = 12 * (drafts * rows + tokens) + 16 * rows
        self._device = torch.zeros(self._size, dtype=torch.uint8, device=device)
        self.drafted, self.following, self.going_on, self.scores, self.best = self._split(self._device)
        self.places = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """Of the drafts, in the shortlist."""
        self._peaks = [torch.zeros(self._shape, device=device) for _ in range(3)]
        self._unused = torch.zeros(rows, dtype=torch.int64, device=device)
        self._deep = [torch.zeros(tokens, device=device) for _ in range(2)]
        self.token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Of the deep pass."""

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        drafts, rows = self._shape
        count, tokens = drafts * rows, rows * (drafts + 1)
        border = 8 * (count + tokens + 2 * rows)
        wide, narrow = buffer[:border].view(torch.int64), buffer[border:].view(torch.float32)
        drafted, following, going_on = wide[:count], wide[count : count + tokens], wide[count + tokens :]
        scores, best = narrow[:count], narrow[count:]
        return [drafted.view(self._shape), following, going_on.view(2, rows), scores.view(self._shape), best]

    def peaks_of(self, ahead: int) -> Peaks:
        """Where the peaks of one draft pass go. Which place is drafted is chosen by others, who are quicker or have
        other wishes."""
        best, second, total = (part[ahead] for part in self._peaks)
        return Peaks(best, self._unused, second, total)

    @property
    def all_peaks(self) -> Peaks:
        """Of all draft passes, one behind another."""
        best, second, total = (part.flatten() for part in self._peaks)
        return Peaks(best, self.places.flatten(), second, total)

    @property
    def deep_peaks(self) -> Peaks:
        """Where those of the deep pass go."""
        return Peaks(self.best, self.following, *self._deep)

    def landing(self) -> Landing:
        """A place on the host for what is said."""
        host = torch.zeros(self._size, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        return Landing(host, self._split(host))

    def send(self, landing: Landing) -> None:
        landing.host.copy_(self._device, non_blocking=True)


class Landing:
    """Where on the host it arrives."""

    def __init__(self, host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.host = host
        self._parts = [part.numpy() for part in parts]

    def read(self) -> Said:
        """Once it has arrived."""
        drafted, following, *others = (part.tolist() for part in self._parts)
        return Said(drafted, tuple(following), *others)
