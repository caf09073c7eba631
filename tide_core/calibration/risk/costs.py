"""Costs of passes, and the speed-up that follows from them. Numpy only.

Decode reads weights, so a pass over few tokens costs what its weights cost, and a deep pass over five pending tokens
costs about what a deep pass over one does. A cycle of a row with n drafts is n + 1 shallow passes, each with an exit
head except where the draft limit ends the cycle, and one deep pass over n + 1 tokens. B rows run their cycles together:
a shallow pass runs as long as any row still drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tide_core.calibration.risk.simulate import CycleCounts
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.train.candidates import Candidate
    from tide_core.models.adapter import ModelAdapter

RIDGE_TOKENS = 128
"""Tokens in a pass from which arithmetic, not reading weights, determines its time; typical of data-centre GPUs."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of passes by the number of tokens in them, in any unit: only ratios count. Linear between entries."""

    tokens: tuple[int, ...]
    """Numbers of tokens, rising."""
    shallow: tuple[float, ...]
    """The layers up to the checkpoint layer."""
    head: tuple[float, ...]
    """Exit head, router and shortlist."""
    deep: tuple[float, ...]
    """The other layers and the model's own head."""

    def __post_init__(self) -> None:
        if not self.tokens or self.tokens[0] < 1 or list(self.tokens) != sorted(set(self.tokens)):
            raise ConfigError("costs.tokens", self.tokens, "rising numbers of tokens of at least 1")
        for name in ("shallow", "head", "deep"):
            values = getattr(self, name)
            if len(values) != len(self.tokens) or any(not 0.0 <= value < np.inf for value in values):
                expected = f"{len(self.tokens)} numbers of at least 0, one for each number of tokens"
                raise ConfigError(f"costs.{name}", values, expected)

    def shallow_of(self, num_tokens: float) -> float:
        return self._at(self.shallow, num_tokens)

    def head_of(self, num_tokens: float) -> float:
        return self._at(self.head, num_tokens)

    def deep_of(self, num_tokens: float) -> float:
        return self._at(self.deep, num_tokens)

    def draft_of(self, num_tokens: float) -> float:
        """One drafting pass: shallow layers and exit head."""
        return self.shallow_of(num_tokens) + self.head_of(num_tokens)

    def full_of(self, num_tokens: float) -> float:
        return self.shallow_of(num_tokens) + self.deep_of(num_tokens)

    @property
    def draft_share(self) -> float:
        """Cost of a draft in units of a full pass, one token each."""
        return self.draft_of(1) / self.full_of(1)

    def _at(self, costs: tuple[float, ...], num_tokens: float) -> float:
        last = self.tokens[-1]
        if num_tokens <= last or len(costs) == 1:
            return float(np.interp(num_tokens, self.tokens, costs))
        slope = (costs[-1] - costs[-2]) / (last - self.tokens[-2])
        return costs[-1] + max(slope, 0.0) * (num_tokens - last)


def costs_of(candidate: Candidate, adapter: ModelAdapter, shortlist_size: int) -> CostModel:
    """Costs of a candidate as parameters read: the same on every machine. The engine measures its own costs."""
    width = candidate.head.spec.width
    of_layers = sum(parameter.numel() for layer in adapter.layers for parameter in layer.parameters())
    of_router = sum(parameter.numel() for parameter in candidate.router.parameters())
    return parameter_costs(
        layer_parameters=of_layers // adapter.num_layers,
        num_layers=adapter.num_layers,
        checkpoint_layer=candidate.layer,
        head_parameters=candidate.head.num_draft_parameters + of_router,
        shortlist_parameters=shortlist_size * width,
        vocabulary_parameters=adapter.vocab_size * width,
    )


def parameter_costs(
    *,
    layer_parameters: int,
    num_layers: int,
    checkpoint_layer: int,
    head_parameters: int,
    shortlist_parameters: int,
    vocabulary_parameters: int,
    ridge_tokens: int = RIDGE_TOKENS,
) -> CostModel:
    """Costs as parameters read, where nothing has been measured.

    `head_parameters` are those of exit head and router; `shortlist_parameters` and `vocabulary_parameters` are rows of
    the output embedding times the width."""
    if not 0 < checkpoint_layer < num_layers:
        raise ConfigError("checkpoint_layer", checkpoint_layer, f"an integer in 1..{num_layers - 1}")
    shallow = float(layer_parameters * checkpoint_layer)
    deep = float(layer_parameters * (num_layers - checkpoint_layer) + vocabulary_parameters)
    head = float(head_parameters + shortlist_parameters)
    scale = (1.0, 1.0, 2.0)
    return CostModel(
        tokens=(1, ridge_tokens, 2 * ridge_tokens),
        shallow=tuple(shallow * s for s in scale),
        head=tuple(head * s for s in scale),
        deep=tuple(deep * s for s in scale),
    )


def predict_speedup(counts: CycleCounts, costs: CostModel, batch_size: int = 1) -> float:
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


def predict_speedups(counts: CycleCounts, costs: CostModel, batch_sizes: Sequence[int]) -> dict[int, float]:
    return {batch_size: predict_speedup(counts, costs, batch_size) for batch_size in batch_sizes}


def _shared(cost_of: Callable[[float], float], share: float, batch_size: int) -> float:
    """Expected cost of a pass that each of the rows joins with probability `share`; 0 where no row joins."""
    needed = 1.0 - (1.0 - share) ** batch_size
    return needed * cost_of(batch_size * share / needed) if needed > 0.0 else 0.0
