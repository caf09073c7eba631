"""How a cycle chooses tokens on the device: the largest logit, or a sample."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tide_core.execution.graphs.cycle_output import OutputBuffer
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import CycleParts
from tide_core.kernels.reference.draw import DRAFT_INDEX, NUM_HEAD, DrawnCycle, places_of


class TokenChooser(Protocol):
    """Called by every draft pass in turn, then once by the deep pass."""

    def draft(self, distance: int, logits: torch.Tensor, output: OutputBuffer) -> None:
        """Write where in the shortlist the drafts of logits [R, S] are."""
        ...

    def take(self, has_suffix: torch.Tensor) -> None:
        """`has_suffix` [K, R] is True where a suffix draft replaces the draft of an exit."""
        ...

    def choose(self, logits: torch.Tensor, output: OutputBuffer) -> None:
        """Write the largest of logits [T, V] at full depth, and the tokens that follow."""
        ...


class Greedy:
    """For greedy rows. At the first draft, branch n takes the token ranked n-th."""

    def __init__(self, kernels: CudaKernels, rows: int, branches: int, device: torch.device) -> None:
        self._kernels = kernels
        self._first_ranks = torch.arange(rows, dtype=torch.int32, device=device) % branches
        self._ranks = torch.zeros_like(self._first_ranks)
        self._scratch: Any = None

    def draft(self, distance: int, logits: torch.Tensor, output: OutputBuffer) -> None:
        self._kernels.nth_best(logits, self._ranks if distance else self._first_ranks, out=output.places[distance])

    def take(self, has_suffix: torch.Tensor) -> None:
        pass

    def choose(self, logits: torch.Tensor, output: OutputBuffer) -> None:
        if self._scratch is None:  # the first run is not captured
            self._scratch = self._kernels.score_scratch(logits.device, len(logits), vocabulary=logits.shape[1])
        self._kernels.top2_logsumexp(logits, self._scratch, out=output.deep_top2)


class Sampled:
    """For cycles with sampled rows: a draft is accepted or replaced by the rejection rule of `exits.verify`."""

    def __init__(
        self,
        kernels: CudaKernels,
        exits: Exits | None,
        row_meta: torch.Tensor,
        parts: CycleParts,
        settings: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        """`settings` [5, R]: how rows sample. `numbers` [4, K + 1, R]: their random numbers in this cycle."""
        self._kernels, self._exits = kernels, exits
        self._parts, self._settings, self._numbers = parts, settings, numbers
        rows, drafts = row_meta.shape[1], numbers.shape[1] - 1  # those of no exit keep a head of zeros
        self._heads = torch.zeros((drafts, rows, NUM_HEAD), dtype=torch.float64, device=row_meta.device)
        self._logits: list[torch.Tensor] = []
        """Of the draft passes, for the deep pass."""
        self._places: torch.Tensor | None = None

    def draft(self, distance: int, logits: torch.Tensor, output: OutputBuffer) -> None:
        assert self._exits is not None
        if distance == 0:  # a run that failed may have left some
            self._logits = []
        self._logits.append(logits)
        given = logits, self._settings, self._numbers[DRAFT_INDEX, distance], self._exits.vocab_size
        self._kernels.draw(*given, out=(output.places[distance], self._heads[distance]))

    def take(self, has_suffix: torch.Tensor) -> None:
        self._heads.masked_fill_(has_suffix[..., None], 0.0)

    def choose(self, logits: torch.Tensor, output: OutputBuffer) -> None:
        parts, drafted = self._parts, self._logits
        self._logits = []  # graphs share memory, which is free again only when nothing refers to it
        plain, _, accept, residual = self._numbers
        rows, vocab_size = self._settings.shape[1], logits.shape[1]
        shortlist = logits.new_empty(0, dtype=torch.int64) if self._exits is None else self._exits.shortlist
        if self._places is None:  # the first run is not captured
            self._places = places_of(shortlist, vocab_size)
        cycle = DrawnCycle(
            parts.sources,
            parts.starts[rows:],
            parts.counting,
            self._settings,
            plain,
            accept[:-1],
            residual[:-1],
            output.scores,
            output.drafted,
            torch.stack(drafted) if drafted else logits.new_empty(0, rows, 0),
            self._heads,
            self._places,
        )
        self._kernels.verify_drawn(logits, cycle, out=(output.best, output.following))
