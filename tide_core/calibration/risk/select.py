"""Which exit to serve, how eagerly to draft, and whether it pays at all. Numpy only.

What counts is agreement against cost: a shallow exit that is right often enough beats a deep one that is right more
often. Every candidate (checkpoint layer and head kind) is replayed on its traces for a grid of draft thresholds and
draft lengths, and priced. The best one is the choice; the verdict says what it is expected to bring at each batch
size, or that exits will not pay on this model.

The choice looks at its traces, so these must not be the ones on which thresholds are certified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tide_core.calibration.risk.costs import CostModel, predict_speedup, predict_speedups
from tide_core.calibration.risk.risk import threshold_grid
from tide_core.calibration.risk.simulate import CycleCounts, PackedTraces, pack, simulate_all
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.risk.traces import CandidateTraces

DRAFT_THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
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
    """Predicted over full depth, at the batch size of the choice."""
    draft_share: float
    """Cost of a draft in units of a full pass."""
    counts: CycleCounts


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice among candidates."""

    best: DraftPlan
    plans: tuple[DraftPlan, ...]
    """One per candidate, best first."""
    batch_size: int
    """The one the choice is best at."""
    speedups: Mapping[int, float]
    """Of the best plan, by batch size."""

    @property
    def pays(self) -> bool:
        return any(speedup > LEAST_GAIN for speedup in self.speedups.values())

    @property
    def verdict(self) -> tuple[str, ...]:
        return verdict_lines(self.best, self.speedups)


@dataclass(frozen=True, slots=True)
class FastChoice:
    """An exit threshold for mode `fast`, with what was measured at it, teacher-forced."""

    threshold: float
    disagreement: float
    """Per generated token."""
    layers_per_token: float
    coverage: float
    """Share of tokens emitted at an exit."""
    num_sequences: int


def select_candidate(
    candidates: Sequence[CandidateTraces],
    costs: Mapping[str, CostModel],
    *,
    batch_size: int = 1,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    draft_thresholds: Sequence[float] = DRAFT_THRESHOLDS,
    max_drafts: int | None = None,
) -> Selection:
    """The candidate and the way to draft with the highest predicted speed-up in mode `verified`.

    `costs` are by candidate name. Of equal plans the one with fewer drafts and the higher threshold is taken."""
    if not candidates:
        raise ConfigError("candidates", 0, "at least one candidate with traces")
    if missing := [candidate.name for candidate in candidates if candidate.name not in costs]:
        raise ConfigError("costs", missing, "a cost model for every candidate")
    plans = [
        plan_drafts(
            candidate, costs[candidate.name], batch_size=batch_size, draft_thresholds=draft_thresholds, limit=max_drafts
        )
        for candidate in candidates
    ]
    plans.sort(key=lambda plan: -plan.speedup)
    best = plans[0]
    return Selection(
        best=best,
        plans=tuple(plans),
        batch_size=batch_size,
        speedups=predict_speedups(best.counts, costs[best.name], batch_sizes),
    )


def plan_drafts(
    candidate: CandidateTraces,
    costs: CostModel,
    *,
    batch_size: int = 1,
    draft_thresholds: Sequence[float] = DRAFT_THRESHOLDS,
    limit: int | None = None,
) -> DraftPlan:
    """The best draft threshold and draft length, up to `limit`, for one candidate."""
    traces = pack(candidate.sequences)
    longest = traces.max_distance if limit is None else min(limit, traces.max_distance)
    if longest < 1 or not draft_thresholds:
        raise ConfigError("max_drafts", limit, "at least 1, and at least one draft threshold")
    best: DraftPlan | None = None
    for max_drafts in range(1, longest + 1):
        for threshold in sorted(draft_thresholds, reverse=True):
            counts = simulate_all(traces, draft_threshold=threshold, max_drafts=max_drafts).total()
            speedup = predict_speedup(counts, costs, batch_size)
            if best is None or speedup > best.speedup:
                best = DraftPlan(
                    candidate.name,
                    candidate.layer,
                    candidate.kind,
                    threshold,
                    max_drafts,
                    speedup,
                    costs.draft_share,
                    counts,
                )
    assert best is not None
    return best


def measure_plan(plan: DraftPlan, traces: PackedTraces) -> CycleCounts:
    """What the plan does on other traces of its candidate, such as those of the test part."""
    return simulate_all(traces, draft_threshold=plan.draft_threshold, max_drafts=plan.max_drafts).total()


def verdict_lines(best: DraftPlan, speedups: Mapping[int, float]) -> tuple[str, ...]:
    """What to expect, for people."""
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


def choose_fast(
    traces: PackedTraces,
    *,
    layer: int,
    num_layers: int,
    max_drafts: int,
    max_disagreement: float = 0.05,
    grid: Sequence[float] | None = None,
) -> FastChoice | None:
    """The loosest threshold whose disagreement is at most the limit; None if nothing leaves at any such threshold.

    The number is that of the traces it was chosen on; state one from others with `measure_fast`."""
    best: FastChoice | None = None
    for threshold in sorted(threshold_grid() if grid is None else grid, reverse=True):
        found = measure_fast(traces, threshold, layer=layer, num_layers=num_layers, max_drafts=max_drafts)
        if found.disagreement <= max_disagreement and found.coverage > 0.0:
            best = found
    return best


def measure_fast(traces: PackedTraces, threshold: float, *, layer: int, num_layers: int, max_drafts: int) -> FastChoice:
    """Mode `fast` on traces: tokens that score enough leave, up to `max_drafts` in a row; then one runs deep.

    Teacher-forced: neither wrong tokens nor projected K and V have an effect on what follows."""
    walks = simulate_all(traces, draft_threshold=threshold, max_drafts=max_drafts, exit_threshold=threshold)
    counts = walks.total()
    tokens = max(counts.tokens, 1)
    left = counts.exits
    return FastChoice(
        threshold=float(threshold),
        disagreement=counts.disagreements / tokens,
        layers_per_token=(left * layer + (counts.tokens - left) * num_layers) / tokens,
        coverage=left / tokens,
        num_sequences=traces.num_sequences,
    )
