"""From traces to a decision: which exit to serve, at which thresholds, and what is promised of it.

The test part chooses: candidate, draft threshold, draft length, threshold of mode `fast`. The calibration part, which
nothing before has looked at, certifies the thresholds of mode `bounded` and gives all numbers that are stated of the
choice. Where prompts that people wrote are a part of their own, a threshold of `bounded` must be certified on that
part as well, and the stricter of the two is taken: the model's own prompts are a little easier than real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.risk.costs import CostModel, parameter_costs, predict_speedups
from tide_core.calibration.risk.risk import RiskChoice, choose_thresholds, risk_curve
from tide_core.calibration.risk.select import (
    BATCH_SIZES,
    DraftPlan,
    FastChoice,
    choose_fast,
    measure_fast,
    measure_plan,
    select_candidate,
    verdict_lines,
)
from tide_core.calibration.risk.simulate import acceptance_by_distance, pack
from tide_core.calibration.risk.traces import CandidateTraces
from tide_core.calibration.train.candidates import Candidate
from tide_core.models.adapter import ModelAdapter


@dataclass(frozen=True, slots=True)
class Decision:
    """What is served and promised."""

    plans: tuple[DraftPlan, ...]
    """One per candidate, best first, as the test part has them."""
    best: DraftPlan
    """The first of them, with the counts of the calibration part."""
    acceptance: tuple[float, ...]
    choices: tuple[RiskChoice, ...]
    fast: FastChoice | None
    speedups: Mapping[int, float]
    """Predicted over full depth in mode `verified`, by batch size."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """For people."""
        return (*verdict_lines(self.best, self.speedups), *(f"bounded, {choice}" for choice in self.choices))


def decide(
    config: CalibrationConfig,
    traces: Mapping[str, Sequence[CandidateTraces]],
    costs: Mapping[str, CostModel],
    num_layers: int,
) -> Decision:
    """`traces` are of the test and the calibration part; `costs` by candidate name."""
    selection = select_candidate(traces["test"], costs, max_drafts=config.max_drafts)
    chosen = selection.best
    layer, most = chosen.layer, chosen.max_drafts
    seen, unseen = (pack(traces_of(traces[part], chosen.name).sequences) for part in ("test", "calibration"))
    fast = choose_fast(seen, layer=layer, num_layers=num_layers, max_drafts=most)
    if fast is not None:
        fast = measure_fast(unseen, fast.threshold, layer=layer, num_layers=num_layers, max_drafts=most)
    counts = measure_plan(chosen, unseen)
    choices = []
    for part in ("calibration", "given"):
        if part in traces:
            packed = unseen if part == "calibration" else pack(traces_of(traces[part], chosen.name).sequences)
            curve = risk_curve(packed, draft_threshold=chosen.draft_threshold, max_drafts=most)
            choices.append(choose_thresholds(curve, config.epsilons, config.delta))
    return Decision(
        plans=selection.plans,
        best=replace(chosen, counts=counts),
        acceptance=acceptance_by_distance(unseen, chosen.draft_threshold, most),
        choices=tuple(strictest(each) for each in zip(*choices, strict=True)),
        fast=fast,
        speedups=predict_speedups(counts, costs[chosen.name], BATCH_SIZES),
    )


def strictest(choices: Sequence[RiskChoice]) -> RiskChoice:
    """The choice that holds wherever all of them were made: none where one of them is none."""
    return max(choices, key=lambda choice: math.inf if choice.threshold is None else choice.threshold)


def traces_of(traces: Sequence[CandidateTraces], name: str) -> CandidateTraces:
    return next(each for each in traces if each.name == name)


def costs_of(candidate: Candidate, adapter: ModelAdapter, shortlist: Tensor) -> CostModel:
    """By parameters read: the same on every machine. The engine measures its own before it drafts."""
    width = candidate.head.spec.width
    of_layers = sum(parameter.numel() for layer in adapter.layers for parameter in layer.parameters())
    of_router = sum(parameter.numel() for parameter in candidate.router.parameters())
    return parameter_costs(
        layer_parameters=of_layers // adapter.num_layers,
        num_layers=adapter.num_layers,
        checkpoint_layer=candidate.layer,
        head_parameters=candidate.head.num_draft_parameters + of_router,
        shortlist_parameters=len(shortlist) * width,
        vocabulary_parameters=adapter.vocab_size * width,
    )
