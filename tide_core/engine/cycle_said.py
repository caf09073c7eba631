"""What a cycle says: filled in by its passes on the device, and brought to the host in one transfer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tide_core.kernels.reference import Peaks


class Said(NamedTuple):
    """With K drafts of R rows, and T tokens of the deep pass."""

    drafted: list[list[int]]
    """[K][R] token ids."""
    following: list[int]
    """[T] the tokens that follow those of the deep pass."""
    scores: list[list[float]]
    """[K][R] of the drafts."""
    best: list[float]
    """[T] the largest logits at full depth."""


class CycleSaid:
    """The tensors behind it, and what stays on the device."""

    def __init__(self, rows: int, drafts: int, device: torch.device) -> None:
        tokens, self._shape = rows * (drafts + 1), (drafts, rows)
        size = 12 * (drafts * rows + tokens)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.drafted, self.following, self.scores, self.best = self._split(self._device)
        self._there = [part.numpy() for part in self._split(self._host)]
        self.places = torch.zeros(self._shape, dtype=torch.int64, device=device)
        """Of the drafts, in the shortlist."""
        self._peaks = [torch.zeros(self._shape, device=device) for _ in range(3)]
        self._deep = [torch.zeros(tokens, device=device) for _ in range(2)]
        self.token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Of the deep pass."""

    def _split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        drafts, rows = self._shape
        count, tokens = drafts * rows, rows * (drafts + 1)
        wide = buffer[: 8 * (count + tokens)].view(torch.int64)
        narrow = buffer[8 * (count + tokens) :].view(torch.float32)
        return wide[:count].view(self._shape), wide[count:], narrow[:count].view(self._shape), narrow[count:]

    def peaks_of(self, ahead: int) -> Peaks:
        """Where the peaks of one draft pass go."""
        best, second, total = (part[ahead] for part in self._peaks)
        return Peaks(best, self.places[ahead], second, total)

    @property
    def all_peaks(self) -> Peaks:
        """Of all draft passes, one behind another."""
        best, second, total = (part.flatten() for part in self._peaks)
        return Peaks(best, self.places.flatten(), second, total)

    @property
    def deep_peaks(self) -> Peaks:
        """Where those of the deep pass go."""
        return Peaks(self.best, self.following, *self._deep)

    def send(self) -> None:
        self._host.copy_(self._device, non_blocking=True)

    def read(self) -> Said:
        """Once it has arrived."""
        return Said(*(part.tolist() for part in self._there))
