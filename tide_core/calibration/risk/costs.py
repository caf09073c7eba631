"""Costs of passes, and the speed-up that follows from them.

Decode reads weights, so a pass over few tokens costs what its weights cost, and a deep pass over five pending tokens
costs about what a deep pass over one does. What a cycle of a row with n drafts costs:

    one token a pass   n + 1 shallow passes, each with an exit head except where the draft limit ends the cycle, and
                       one deep pass over n + 1 tokens
    in one pass        a shallow pass of the newest token, a pass of the head over as many places as drafts are
                       planned, then cell and shortlist for each draft after the first, whether its score is enough or
                       ends the cycle; a shallow pass over n tokens if there are any, and the same deep pass

B rows run their cycles together: a pass runs as long as any row still drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tide_core.calibration.risk.simulate import CycleCounts

if TYPE_CHECKING:
    from torch import Tensor

    from tide_core.calibration.train.candidates import Candidate
    from tide_core.models.adapter import ModelAdapter

RIDGE_TOKENS = 128
"""Tokens in a pass from which arithmetic, not reading weights, determines its time; typical of data-centre GPUs."""
PRIOR_ACCEPTANCE = 0.7
"""Share of right drafts that is assumed of exits that are not trained yet; heads of the demo model reach about that."""
PRIOR_ACCEPTANCE_IN_ONE_PASS = 0.66
"""The same of heads that draft in one pass."""


class Costs(Protocol):
    """Costs of passes by their number of tokens, in any unit: only ratios count."""

    @property
    def in_one_pass(self) -> bool:
        """Whether the head drafts all tokens of a cycle in one pass."""

    def shallow_of(self, num_tokens: float) -> float:
        """The layers up to the checkpoint layer."""

    def first_draft_of(self, num_tokens: float, places: int = 1) -> float:
        """The first draft of so many rows: shallow layers, exit head, router and shortlist. In one pass the head runs
        over the places of all drafts that are planned; otherwise their number changes nothing."""

    def next_draft_of(self, num_tokens: float) -> float:
        """A further draft: the same again, or in one pass cell, router and shortlist."""

    def deep_of(self, num_tokens: float) -> float:
        """The other layers and the model's own head."""

    def full_of(self, num_tokens: float) -> float:
        """All layers and the model's own head."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of passes over few tokens, which grow with the tokens from `RIDGE_TOKENS` on."""

    shallow: float
    head: float
    """Exit head, up to what a router and a shortlist read."""
    deep: float
    choose: float = 0.0
    """From what the head gives to a token and its score: the last step of a narrow head, router and shortlist."""
    cell: float = 0.0
    """Of a head that drafts in one pass; 0 for others."""

    @property
    def in_one_pass(self) -> bool:
        return bool(self.cell)

    def shallow_of(self, num_tokens: float) -> float:
        return self.shallow * _scale(num_tokens)

    def deep_of(self, num_tokens: float) -> float:
        return self.deep * _scale(num_tokens)

    def first_draft_of(self, num_tokens: float, places: int = 1) -> float:
        if not self.in_one_pass:
            return (self.shallow + self.head + self.choose) * _scale(num_tokens)
        return (self.shallow + self.choose) * _scale(num_tokens) + self.head * _scale(num_tokens * places)

    def next_draft_of(self, num_tokens: float) -> float:
        if not self.in_one_pass:
            return self.first_draft_of(num_tokens)
        return (self.cell + self.choose) * _scale(num_tokens)

    def full_of(self, num_tokens: float) -> float:
        return (self.shallow + self.deep) * _scale(num_tokens)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of passes on one device, measured at some numbers of tokens; in between on the line."""

    tokens: tuple[int, ...]
    """Rising."""
    shallow: tuple[float, ...]
    draft: tuple[float, ...]
    """The first draft of a cycle, with one place."""
    full: tuple[float, ...]
    head: tuple[float, ...] = ()
    """The head alone, by places of all rows. This and the next only of heads that draft in one pass."""
    further: tuple[float, ...] = ()
    """A draft after the first."""

    @property
    def in_one_pass(self) -> bool:
        return bool(self.further)

    def shallow_of(self, num_tokens: float) -> float:
        return self._between(self.shallow, num_tokens)

    def first_draft_of(self, num_tokens: float, places: int = 1) -> float:
        cost = self._between(self.draft, num_tokens)
        if self.in_one_pass and places > 1:
            cost += max(0.0, self._between(self.head, num_tokens * places) - self._between(self.head, num_tokens))
        return cost

    def next_draft_of(self, num_tokens: float) -> float:
        return self._between(self.further if self.in_one_pass else self.draft, num_tokens)

    def deep_of(self, num_tokens: float) -> float:
        return self.full_of(num_tokens) - self.shallow_of(num_tokens)

    def full_of(self, num_tokens: float) -> float:
        return self._between(self.full, num_tokens)

    def _between(self, seconds: tuple[float, ...], num_tokens: float) -> float:
        """Beyond the most tokens that were measured the cost of a token stays the same."""
        beyond = max(1.0, num_tokens / self.tokens[-1])
        return float(np.interp(num_tokens, self.tokens, seconds)) * beyond


@dataclass(frozen=True, slots=True)
class DraftShares:
    """Costs of drafts of one row in units of a full pass."""

    first: float
    further: float | None
    """Of each draft after the first; None: the same, because the head drafts one token a pass."""

    @classmethod
    def of(cls, costs: Costs, drafts: int) -> DraftShares:
        """In a cycle of so many drafts."""
        full = costs.full_of(1)
        further = costs.next_draft_of(1) / full if costs.in_one_pass else None
        return cls(costs.first_draft_of(1, drafts) / full, further)

    def __str__(self) -> str:
        return f"{self.first:.3f}" if self.further is None else f"{self.first:.3f}, then {self.further:.3f}"


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
    """Cost of a draft in units of a full pass; in one pass, of the first one of a cycle."""
    speedup: float
    """Predicted over full depth for one row, with the prior acceptance."""
    tokens_per_s: float | None
    """The same on this device; None where nothing was timed."""
    trained: bool
    further_share: float | None = None
    """Cost of each further draft of a head that drafts in one pass."""

    @property
    def shares(self) -> DraftShares:
        return DraftShares(self.draft_share, self.further_share)


def costs_of(candidate: Candidate, adapter: ModelAdapter, shortlist_size: int) -> CostModel:
    """Costs of a candidate as parameters read: the same on every machine. The engine measures its own costs. Those of
    models for which heads are chosen by cost are measured as well (`pass_times`)."""
    head, width = candidate.head, candidate.head.spec.width
    of_layers = sum(parameter.numel() for layer in adapter.layers for parameter in layer.parameters())
    of_layer = of_layers // adapter.num_layers
    widen = [*head.skip_norm.parameters(), *head.up.parameters()] if head.spec.narrow else []
    choose = _numel(widen) + _numel(candidate.router.parameters()) + shortlist_size * width
    cell = _numel(head.cell.parameters()) if head.spec.in_one_pass else 0
    return CostModel(
        shallow=float(of_layer * candidate.layer),
        head=float(head.num_draft_parameters - _numel(widen) - cell),
        deep=float(of_layer * (adapter.num_layers - candidate.layer) + adapter.vocab_size * width),
        choose=float(choose),
        cell=float(cell),
    )


def _numel(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def prior_speedup(costs: Costs, max_drafts: int, acceptance: float | None = None) -> float:
    """Tokens per time of one row over those of full depth, with the best number of drafts, before anything is trained:
    each draft after right ones is right with this probability, by default the same for every exit of its kind."""
    if acceptance is None:
        acceptance = PRIOR_ACCEPTANCE_IN_ONE_PASS if costs.in_one_pass else PRIOR_ACCEPTANCE
    best, tokens, accepted = 1.0, 1.0, 1.0
    for drafts in range(1, max_drafts + 1):
        accepted *= acceptance
        tokens += accepted
        drafting = costs.first_draft_of(1, drafts) + (drafts - 1) * costs.next_draft_of(1)
        not_shallow = drafts if costs.in_one_pass else 1  # tokens that drafting did not run through the shallow layers
        cycle = drafting + costs.shallow_of(not_shallow) + costs.deep_of(1 + drafts)
        best = max(best, tokens * costs.full_of(1) / cycle)
    return best


def predict_speedup(counts: CycleCounts, costs: Costs, batch_size: int = 1) -> float:
    """Tokens per time of such cycles over those of full depth, both with `batch_size` rows."""
    cycles = counts.deep_passes
    if not cycles:
        return 1.0
    attempts = [(made + refused) / cycles for made, refused in zip(counts.drafted_at, counts.refused_at, strict=True)]
    cost = 0.0
    if attempts:
        first, *others = attempts
        cost += _shared(lambda num_tokens: costs.first_draft_of(num_tokens, len(attempts)), first, batch_size)
        cost += sum(_shared(costs.next_draft_of, share, batch_size) for share in others)
    # A shallow pass without a head: of the last draft, or in one pass of the newest token where nothing is drafted.
    with_head = sum(attempts[:1]) if costs.in_one_pass else sum(counts.refused_at) / cycles
    cost += _shared(costs.shallow_of, max(0.0, 1.0 - with_head), batch_size)
    at_least = [cycles, *counts.drafted_at, 0]
    mean_drafts = counts.drafts / cycles
    for drafts, (here, more) in enumerate(pairwise(at_least)):
        # One row with its own number of drafts, the others at their mean: exact for one row, close for many.
        num_drafts = drafts + (batch_size - 1) * mean_drafts
        deep = costs.deep_of(batch_size + num_drafts)
        if costs.in_one_pass and num_drafts:
            deep += costs.shallow_of(num_drafts)
        cost += (here - more) / cycles * deep
    return counts.tokens / cycles * costs.full_of(batch_size) / cost


def predict_speedups(counts: CycleCounts, costs: Costs, batch_sizes: Sequence[int]) -> dict[int, float]:
    return {batch_size: predict_speedup(counts, costs, batch_size) for batch_size in batch_sizes}


def _shared(cost_of: Callable[[float], float], share: float, batch_size: int) -> float:
    """Expected cost of a pass that each of the rows joins with probability `share`; 0 where no row joins."""
    needed = 1.0 - (1.0 - share) ** batch_size
    return needed * cost_of(batch_size * share / needed) if needed > 0.0 else 0.0
