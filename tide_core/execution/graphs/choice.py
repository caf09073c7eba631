"""What follows the tokens of a cycle, found on the device: the likeliest tokens, or tokens drawn at random."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from tide_core.execution.graphs.cycle_output import CycleSaid
from tide_core.execution.graphs.draw_numbers import DrawNumbers
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import DRAFTS, CycleParts
from tide_core.kernels.reference.draw import NUM_HEAD, DrawnCycle, places_of


class CycleChoice(Protocol):
    """Asked by every draft pass in turn, then once by the deep pass."""

    def draft(self, ahead: int, logits: torch.Tensor, said: CycleSaid) -> None:
        """Say where in the shortlist the drafts of logits [R, S] stand."""
        ...

    def settle(self, logits: torch.Tensor, said: CycleSaid) -> None:
        """Of logits [T, V] at full depth say the largest, and the tokens that follow."""
        ...


class Likeliest:
    """For cycles of rows that take the likeliest token; at the first draft, branches take the ones behind it."""

    def __init__(self, kernels: CudaKernels, rows: int, branches: int, device: torch.device) -> None:
        self._kernels = kernels
        self._first_ranks = torch.arange(rows, dtype=torch.int32, device=device) % branches
        self._ranks = torch.zeros_like(self._first_ranks)
        self._scratch: Any = None

    def draft(self, ahead: int, logits: torch.Tensor, said: CycleSaid) -> None:
        self._kernels.nth_best(logits, self._ranks if ahead else self._first_ranks, out=said.places[ahead])

    def settle(self, logits: torch.Tensor, said: CycleSaid) -> None:
        if self._scratch is None:  # the first run is not captured
            self._scratch = self._kernels.judge_scratch(logits.device, len(logits), vocabulary=logits.shape[1])
        self._kernels.peak(logits, self._scratch, out=said.deep_peaks)


class _Made(NamedTuple):
    """What one draft pass leaves for the deep pass, or all of them, one behind another."""

    logits: torch.Tensor
    heads: torch.Tensor


class Drawn:
    """For cycles in which some rows draw: a draft stays, or is replaced, by the rejection rule of `verify`."""

    def __init__(
        self, kernels: CudaKernels, exits: Exits | None, about: torch.Tensor, parts: CycleParts, numbers: DrawNumbers
    ) -> None:
        """`about` are the rows, as `cycle_plan` has them."""
        self._kernels, self._exits = kernels, exits
        self._about, self._parts, self._numbers = about, parts, numbers
        self._made: list[_Made] = []
        self._places: torch.Tensor | None = None

    def draft(self, ahead: int, logits: torch.Tensor, said: CycleSaid) -> None:
        assert self._exits is not None
        settings, numbers = self._numbers.settings, self._numbers.draft[ahead]
        places, heads = self._kernels.draw(logits, settings, numbers, self._exits.vocab_size)
        if ahead == 0:  # a run that failed may have left some
            self._made = []
        self._made.append(_Made(logits, heads))
        said.places[ahead] = places

    def settle(self, logits: torch.Tensor, said: CycleSaid) -> None:
        parts, numbers, made = self._parts, self._numbers, self._made
        self._made = []  # graphs share memory, which is theirs again only when nobody holds it
        rows, vocab_size = self._about.shape[1], logits.shape[1]
        shortlist = logits.new_empty(0, dtype=torch.int64) if self._exits is None else self._exits.shortlist
        if self._places is None:  # the first run is not captured
            self._places = places_of(shortlist, vocab_size)
        drafts = (
            _Made(*(torch.stack(some) for some in zip(*made, strict=True)))
            if made
            else _Made(
                logits.new_empty(0, rows, 0),
                logits.new_empty(0, rows, NUM_HEAD, dtype=torch.float64),
            )
        )
        cycle = DrawnCycle(
            parts.sources,
            parts.starts[rows:],
            self._about[DRAFTS],
            numbers.settings,
            numbers.plain,
            numbers.accept[:-1],
            numbers.residual[:-1],
            said.scores,
            said.drafted,
            drafts.logits,
            drafts.heads,
            self._places,
        )
        best, following = self._kernels.verify_drawn(logits, cycle)
        said.best.copy_(best)
        said.following.copy_(following)
