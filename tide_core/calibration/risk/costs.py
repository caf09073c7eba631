"""Costs of passes, and the speed-up that follows from them.

Decode reads weights, so a pass over few tokens costs what its weights cost, and a deep pass over five pending tokens
costs about what a deep pass over one does. A cycle of a row with n drafts is n + 1 shallow passes, each with an exit
head except where the draft limit ends the cycle, and one deep pass over n + 1 tokens. B rows run their cycles together:
a shallow pass runs as long as any row still drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tide_core.calibration.risk.simulate import CycleCounts

if TYPE_CHECKING:
    from tide_core.calibration.train.candidates import Candidate
    from tide_core.models.adapter import ModelAdapter

RIDGE_TOKENS = 128
"""Tokens in a pass from which arithmetic, not reading weights, determines its time; typical of data-centre GPUs."""
PRIOR_ACCEPTANCE = 0.7
"""Share of right drafts that is assumed of exits that are not trained yet; heads of the demo model reach about that."""


class Costs(Protocol):
    """Costs of passes by their number of tokens, in any unit: only ratios count."""

    def shallow_of(self, num_tokens: float) -> float:
        """The layers up to the checkpoint layer."""

    def draft_of(self, num_tokens: float) -> float:
        """One drafting pass: shallow layers, exit head, router and shortlist."""

    def deep_of(self, num_tokens: float) -> float:
        """The other layers and the model's own head."""

    def full_of(self, num_tokens: float) -> float:
        """All layers and the model's own head."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of passes over few tokens, which grow with the tokens from `RIDGE_TOKENS` on."""

    shallow: float
    head: float
    """Exit head, router and shortlist."""
    deep: float

    def shallow_of(self, num_tokens: float) -> float:
        return self.shallow * _scale(num_tokens)

    def deep_of(self, num_tokens: float) -> float:
        return self.deep * _scale(num_tokens)

    def draft_of(self, num_tokens: float) -> float:
        return (self.shallow + self.head) * _scale(num_tokens)

    def full_of(self, num_tokens: float) -> float:
        return (self.shallow + self.deep) * _scale(num_tokens)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of passes on one device, measured at some numbers of tokens; in between on the line."""

    tokens: tuple[int, ...]
    """Rising."""
    shallow: tuple[float, ...]
    draft: tuple[float, ...]
    full: tuple[float, ...]

    def shallow_of(self, num_tokens: float) -> float:
        return self._between(self.shallow, num_tokens)

    def draft_of(self, num_tokens: float) -> float:
        return self._between(self.draft, num_tokens)

    def deep_of(self, num_tokens: float) -> float:
        return self.full_of(num_tokens) - self.shallow_of(num_tokens)

    def full_of(self, num_tokens: float) -> float:
        return self._between(self.full, num_tokens)

    def _between(self, seconds: tuple[float, ...], num_tokens: float) -> float:
        """Beyond the most tokens that were measured the cost of a token stays the same."""
        beyond = max(1.0, num_tokens / self.tokens[-1])
        return float(np.interp(num_tokens, self.tokens, seconds)) * beyond


def draft_share(costs: Costs) -> float:
    """Cost of a draft in units of a full pass, one token each."""
    return costs.draft_of(1) / costs.full_of(1)


def _scale(num_tokens: float) -> float:
    return max(1.0, num_tokens / RIDGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate, priced before anything is trained."""

    name: str
    layer: int
    inner: int
    """Width at which it works."""
    ffn: int
    num_parameters: int
    draft_share: float
    """Cost of a draft in units of a full pass."""
    speedup: float
    """Predicted over full depth for one row, with the prior acceptance."""
    tokens_per_s: float | None
    """The same on this device; None where nothing was timed."""
    trained: bool


def costs_of(candidate: Candidate, adapter: ModelAdapter, shortlist_size: int) -> CostModel:
    """Costs of a candidate as parameters read: the same on every machine. The engine measures its own costs. Those of
    models for which heads are chosen by cost are measured as well (`pass_times`)."""
    width = candidate.head.spec.width
    of_layers = adapter.num_layer_weights
    of_layer = of_layers // adapter.num_layers
    of_router = sum(parameter.numel() for parameter in candidate.router.parameters())
    return CostModel(
        shallow=float(of_layer * candidate.layer),
        head=float(candidate.head.num_draft_parameters + of_router + shortlist_size * width),
        deep=float(of_layer * (adapter.num_layers - candidate.layer) + adapter.vocab_size * width),
    )


def prior_speedup(costs: Costs, max_drafts: int, acceptance: float = PRIOR_ACCEPTANCE) -> float:
    """Tokens per time of one row over those of full depth, with the best number of drafts, before anything is trained:
    each draft after right ones is right with this probability, the same for every exit."""
    best, tokens, accepted = 1.0, 1.0, 1.0
    for drafts in range(1, max_drafts + 1):
        accepted *= acceptance
        tokens += accepted
        cycle = drafts * costs.draft_of(1) + costs.shallow_of(1) + costs.deep_of(1 + drafts)
        best = max(best, tokens * costs.full_of(1) / cycle)
    return best


def predict_speedup(counts: CycleCounts, costs: Costs, batch_size: int = 1) -> float:
    """Tokens per time of such cycles over those of full depth, both with `batch_size` rows."""
    cycles = counts.deep_passes
    if not cycles:
        return 1.0
    attempts = [(made + refused) / cycles for made, refused in zip(counts.drafted_at, counts.refused_at, strict=True)]
    headless = max(0.0, 1.0 - sum(counts.refused_at) / cycles)
    cost = sum(_shared(costs.draft_of, share, batch_size) for share in attempts)
    cost += _shared(costs.shallow_of, headless, batch_size)
    at_least = [cycles, *counts.drafted_at, 0]
    mean_pending = 1.0 + counts.drafts / cycles
    for drafts, (here, more) in enumerate(pairwise(at_least)):
        # One row with its own number of drafts, the others at their mean: exact for one row, close for many.
        cost += (here - more) / cycles * costs.deep_of(1 + drafts + (batch_size - 1) * mean_pending)
    return counts.tokens / cycles * costs.full_of(batch_size) / cost


def predict_speedups(counts: CycleCounts, costs: Costs, batch_sizes: Sequence[int]) -> dict[int, float]:
    return {batch_size: predict_speedup(counts, costs, batch_size) for batch_size in batch_sizes}


def _shared(cost_of: Callable[[float], float], share: float, batch_size: int) -> float:
    """Expected cost of a pass that each of the rows joins with probability `share`; 0 where no row joins."""
    needed = 1.0 - (1.0 - share) ** batch_size
    return needed * cost_of(batch_size * share / needed) if needed > 0.0 else 0.0
