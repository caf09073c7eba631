"""From traces to a decision: the exit to serve, its thresholds, and the figures of it. Numpy only.

The test part selects: candidate, draft threshold, draft length, threshold of mode `fast`. Every candidate (checkpoint
layer and head kind) is replayed on its traces for a grid of draft thresholds and draft lengths and priced: a shallow
exit that is right often enough beats a deep one that is right more often.

The calibration part, which no earlier choice used, gives all stated numbers. Where prompts written by people form a
part of their own (`given`), mode `fast` is measured on that part as well, and the worse of the two results is stated:
the model's own prompts are slightly easier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.risk.costs import Costs, draft_share, predict_speedup, predict_speedups
from tide_core.calibration.risk.simulate import CycleCounts, PackedTraces, acceptance_by_distance, pack, simulate_all
from tide_core.calibration.risk.traces import CandidateTraces
from tide_core.errors import ConfigError

DRAFT_THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes for which reports predict the speed-up."""
LEAST_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The best way to draft with one candidate."""

    name: str
    layer: int
    kind: str
    draft_threshold: float
    max_drafts: int
    speedup: float
    """Predicted over full depth at batch size 1."""
    draft_share: float
    """Cost of a draft in units of a full pass."""
    counts: CycleCounts


@dataclass(frozen=True, slots=True)
class FastChoice:
    """An exit threshold for mode `fast` and its figures, teacher-forced."""

    threshold: float
    disagreement: float
    """Per generated token."""
    layers_per_token: float
    coverage: float
    """Share of tokens emitted at an exit."""
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The exit to serve and the figures of it."""

    plans: tuple[DraftPlan, ...]
    """One per candidate, best first, with the counts of the test part."""
    best: DraftPlan
    """The first plan, with the counts of the calibration part."""
    acceptance: tuple[float, ...]
    fast: FastChoice | None
    speedups: Mapping[int, float]
    """Predicted over full depth in mode `verified`, by batch size."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """Lines for the report and the terminal."""
        return verdict_lines(self.best, self.speedups)


def decide(
    config: CalibrationConfig,
    traces: Mapping[str, Sequence[CandidateTraces]],
    costs: Mapping[str, Costs],
    num_layers: int,
    *,
    in_cycles: bool = False,
) -> Decision:
    """Select on the test part, measure on the calibration part, mode `fast` also on `given` if there is one.

    `traces` are by part, `costs` by candidate name. `in_cycles`: speed-ups are predicted for an engine that runs whole
    cycles in one launch, as on a GPU."""
    plans = plan_candidates(traces["test"], costs, max_drafts=config.max_drafts)
    chosen = plans[0]
    packed = {part: pack(traces_of(each, chosen.name).sequences) for part, each in traces.items()}
    layer, max_drafts = chosen.layer, chosen.max_drafts
    fast = choose_fast(packed["test"], layer=layer, num_layers=num_layers, max_drafts=max_drafts)
    if fast is not None:
        unseen = [packed[part] for part in ("calibration", "given") if part in packed]
        sizes = {"layer": layer, "num_layers": num_layers, "max_drafts": max_drafts}
        found = [measure_fast(part, fast.threshold, **sizes) for part in unseen]
        fast = max(found, key=lambda each: each.disagreement)
    counts = measure_plan(chosen, packed["calibration"])
    return Decision(
        plans=plans,
        best=replace(chosen, counts=counts),
        acceptance=acceptance_by_distance(packed["calibration"], chosen.draft_threshold, max_drafts),
        fast=fast,
        speedups=cycle_speedups(packed["calibration"], costs[chosen.name], max_drafts)
        if in_cycles
        else predict_speedups(counts, costs[chosen.name], BATCH_SIZES),
    )


def cycle_speedups(traces: PackedTraces, costs: Costs, max_drafts: int) -> dict[int, float]:
    """Predicted speed-ups where all planned drafts of a cycle are made, whatever their scores, and the engine plans the
    best number for each batch size; none at all where they do not pay."""
    speedups = dict.fromkeys(BATCH_SIZES, 1.0)
    for drafts in range(1, max_drafts + 1):
        counts = simulate_all(traces, draft_threshold=0.0, max_drafts=drafts).total()
        for batch_size, speedup in predict_speedups(counts, costs, BATCH_SIZES).items():
            speedups[batch_size] = max(speedups[batch_size], speedup)
    return speedups


def traces_of(traces: Sequence[CandidateTraces], name: str) -> CandidateTraces:
    return next(each for each in traces if each.name == name)


def plan_candidates(
    candidates: Sequence[CandidateTraces], costs: Mapping[str, Costs], *, max_drafts: int
) -> tuple[DraftPlan, ...]:
    """The best plan of every candidate, the highest predicted speed-up in mode `verified` first."""
    if not candidates:
        raise ConfigError("candidates", 0, "at least one candidate with traces")
    if missing := [candidate.name for candidate in candidates if candidate.name not in costs]:
        raise ConfigError("costs", missing, "a cost model for every candidate")
    plans = [plan_drafts(candidate, costs[candidate.name], limit=max_drafts) for candidate in candidates]
    return tuple(sorted(plans, key=lambda plan: -plan.speedup))


def plan_drafts(
    candidate: CandidateTraces,
    costs: Costs,
    *,
    draft_thresholds: Sequence[float] = DRAFT_THRESHOLDS,
    limit: int | None = None,
) -> DraftPlan:
    """The best draft threshold and draft length, up to `limit`, for one candidate.

    Of equal plans, the one with fewer drafts and the higher threshold."""
    traces = pack(candidate.sequences)
    longest = traces.max_distance if limit is None else min(limit, traces.max_distance)
    if longest < 1 or not draft_thresholds:
        raise ConfigError("max_drafts", limit, "at least 1, and at least one draft threshold")
    best: DraftPlan | None = None
    for max_drafts in range(1, longest + 1):
        for threshold in sorted(draft_thresholds, reverse=True):
            counts = simulate_all(traces, draft_threshold=threshold, max_drafts=max_drafts).total()
            speedup = predict_speedup(counts, costs)
            if best is None or speedup > best.speedup:
                best = DraftPlan(
                    candidate.name,
                    candidate.layer,
                    candidate.kind,
                    threshold,
                    max_drafts,
                    speedup,
                    draft_share(costs),
                    counts,
                )
    assert best is not None
    return best


def measure_plan(plan: DraftPlan, traces: PackedTraces) -> CycleCounts:
    """The counts of the plan on other traces of its candidate."""
    return simulate_all(traces, draft_threshold=plan.draft_threshold, max_drafts=plan.max_drafts).total()


def verdict_lines(best: DraftPlan, speedups: Mapping[int, float]) -> tuple[str, ...]:
    """Whether exits pay, and at which batch sizes."""
    by_batch = sorted(speedups.items())
    what = f"{best.kind} head after layer {best.layer}"
    how = f"up to {best.max_drafts} drafts at scores of at least {best.draft_threshold:g}"
    paying = [(batch, speedup) for batch, speedup in by_batch if speedup > LEAST_GAIN]
    if not paying:
        top, speedup = max(by_batch, key=lambda pair: pair[1])
        return (
            "exits will not pay on this model, serve it in `full`",
            f"the best exit, a {what} with {how}, is predicted x{speedup:.2f} at batch {top}",
        )
    shown = ", ".join(f"x{speedup:.2f} at batch {batch}" for batch, speedup in paying)
    drafts = best.counts.accepted / best.counts.drafts if best.counts.drafts else 0.0
    detail = (
        f"{what}, {how}: {drafts:.0%} of drafts accepted, {best.counts.tokens_per_deep_pass:.2f} tokens a deep pass"
    )
    lines = [f"exits pay: predicted {shown}", f"{detail}, a draft costs {best.draft_share:.3f} of a full pass"]
    if losing := [str(batch) for batch, speedup in by_batch if speedup <= LEAST_GAIN]:
        lines.append(f"no gain predicted at batch {', '.join(losing)}: `full` is as fast or faster there")
    return tuple(lines)


def threshold_grid() -> tuple[float, ...]:
    """Thresholds from strict to loose, evenly spaced in the logit of the score; the same for every model."""
    logits = np.arange(10.0, -3.01, -0.0625)
    return tuple(float(score) for score in (1.0 / (1.0 + np.exp(-logits))).astype(np.float32))


def choose_fast(
    traces: PackedTraces,
    *,
    layer: int,
    num_layers: int,
    max_drafts: int,
    max_disagreement: float = 0.05,
    grid: Sequence[float] | None = None,
) -> FastChoice | None:
    """The loosest threshold whose disagreement is at most the limit; None if no token exits at any such threshold.

    The disagreement is that of the traces the threshold was chosen on; to state one, measure it on others."""
    best: FastChoice | None = None
    for threshold in sorted(threshold_grid() if grid is None else grid, reverse=True):
        found = measure_fast(traces, threshold, layer=layer, num_layers=num_layers, max_drafts=max_drafts)
        if found.disagreement <= max_disagreement and found.coverage > 0.0:
            best = found
    return best


def measure_fast(traces: PackedTraces, threshold: float, *, layer: int, num_layers: int, max_drafts: int) -> FastChoice:
    """Mode `fast` on traces: tokens whose score reaches the threshold exit, up to `max_drafts` in a row, then one runs
    at full depth.

    Teacher-forced: wrong tokens and projected K and V have no effect on later tokens."""
    counts = simulate_all(traces, draft_threshold=threshold, max_drafts=max_drafts, exit_threshold=threshold).total()
    tokens = max(counts.tokens, 1)
    return FastChoice(
        threshold=float(threshold),
        disagreement=counts.disagreements / tokens,
        layers_per_token=(counts.exits * layer + (counts.tokens - counts.exits) * num_layers) / tokens,
        coverage=counts.exits / tokens,
        num_sequences=traces.num_sequences,
    )
