"""What a calibration report is made of: numbers only, and the functions that take them from traces. Numpy only.

`ReportData` is all that the report needs. To fill it in:

- `parts`, `settings`, `command`, the names and digests: from the pipeline.
- `candidates`: one `candidate_curves(traces_of_candidate, plan)` each, on held-out sequences; plans from `select`.
- `chosen`: the name of the candidate that is published.
- `risk`: what `risk.choose_thresholds` returned; refused promises belong in it too.
- `acceptance`: `simulate.acceptance_by_distance` of the chosen candidate.
- `predicted`: `costs.predict_speedups` of counts by `select.measure_plan`.
- `exit_histogram`: `exit_histogram(counts, layer, num_layers)` with the same counts.
- `reliability`: `reliability(traces_of_candidate)`.
  These four are best taken from sequences that the choice was not made on.
- `measured`: left empty; `report.add_measured` puts it in when the published exits have been timed.

It is stored as `report.json` beside the report, so that measurements can be added to it later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tide_core.calibration.risk.risk import RiskChoice, threshold_grid
from tide_core.calibration.risk.select import DraftPlan, FastChoice
from tide_core.calibration.risk.simulate import CycleCounts
from tide_core.calibration.risk.traces import CandidateTraces, agreement
from tide_core.calibration.worker_time import WorkerTime
from tide_core.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of the data."""

    name: str
    """train, calibration or test."""
    num_sequences: int
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class CandidateCurves:
    """One candidate, as the report shows it."""

    name: str
    layer: int
    kind: str
    agreement: tuple[float, ...]
    """Share of positions at which the exit's token is the full-depth one, by distance."""
    thresholds: tuple[float, ...]
    """Of the two curves below, strict to loose."""
    coverage: tuple[float, ...]
    """Share of positions whose score reaches the threshold, at distance 1."""
    precision: tuple[float, ...]
    """Share of right tokens among them."""
    draft_threshold: float
    max_drafts: int
    speedup: float
    """Predicted at the batch size of the choice."""
    draft_share: float
    """Cost of a draft in units of a full pass."""


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Positions of similar score."""

    score: float
    """Mean."""
    agreement: float
    num_positions: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Timed speed-ups over full depth, by batch size, and the words that say how."""

    speedups: Mapping[int, float]
    conditions: str
    """Device, dtype, model, modes, lengths, repeats, versions."""
    left_out: str = ""
    """Which batch sizes were asked for and not timed, and why."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything the report says."""

    model: str
    architecture: str
    num_layers: int
    width: int
    vocab_size: int
    weights_digest: str
    tokenizer_digest: str
    tool_version: str
    command: str
    """Repeats the calibration."""
    settings: Mapping[str, str | int | float | bool | None]
    parts: tuple[PartSize, ...]
    shortlist_size: int
    shortlist_coverage: float
    candidates: tuple[CandidateCurves, ...]
    chosen: str
    acceptance: tuple[float, ...]
    """Of drafts by distance, under the chosen plan."""
    tokens_per_deep_pass: float
    risk: tuple[RiskChoice, ...]
    fast: FastChoice | None
    predicted: Mapping[int, float]
    """Speed-up over full depth in mode verified, by batch size."""
    exit_histogram: Mapping[int, int]
    """Tokens by exit layer."""
    reliability: tuple[ReliabilityBin, ...]
    verdict: tuple[str, ...]
    measured: tuple[Measured, ...] = ()
    workers: tuple[WorkerTime, ...] = ()
    """Where several did the work."""
    notes: tuple[str, ...] = field(default=())
    """Sentences to put under the verdict."""

    @property
    def chosen_candidate(self) -> CandidateCurves:
        for candidate in self.candidates:
            if candidate.name == self.chosen:
                return candidate
        raise ConfigError("chosen", self.chosen, f"one of {', '.join(c.name for c in self.candidates)}")

    def to_json(self) -> bytes:
        """Plain JSON; keys that are numbers become strings, and numbers that are none become null."""
        document = {"format_version": FORMAT_VERSION, **_plain(asdict(self))}
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> ReportData:
        try:
            values = json.loads(text)
            version = values.pop("format_version")
            if version != FORMAT_VERSION:
                raise ConfigError("report format version", version, str(FORMAT_VERSION))
            return cls(**{**values, **_typed(values)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("report data", f"{type(error).__name__}: {error}", "a whole report.json") from error


def candidate_curves(candidate: CandidateTraces, plan: DraftPlan) -> CandidateCurves:
    """Agreement, coverage and precision of a candidate."""
    score, right = _first_distance(candidate)
    thresholds = threshold_grid()[::2]
    order = np.argsort(-score, kind="stable")
    reached = np.searchsorted(-score[order], -np.array(thresholds), side="right")
    num_right = np.concatenate(([0], np.cumsum(right[order])))[reached]
    coverage = reached / max(len(score), 1)
    precision = np.where(reached > 0, num_right / np.maximum(reached, 1), np.nan)
    return CandidateCurves(
        name=candidate.name,
        layer=candidate.layer,
        kind=candidate.kind,
        agreement=tuple(agreement(candidate.sequences)),
        thresholds=thresholds,
        coverage=tuple(coverage.tolist()),
        precision=tuple(precision.tolist()),
        draft_threshold=plan.draft_threshold,
        max_drafts=plan.max_drafts,
        speedup=plan.speedup,
        draft_share=plan.draft_share,
    )


def reliability(candidate: CandidateTraces, num_bins: int = 10) -> tuple[ReliabilityBin, ...]:
    """Positions in bins of equal width of their score at distance 1; bins without a position are left out."""
    score, right = _first_distance(candidate)
    kept = np.isfinite(score)
    score, right = score[kept], right[kept]
    bins = np.clip((score * num_bins).astype(int), 0, num_bins - 1)
    found = []
    for index in range(num_bins):
        inside = bins == index
        if inside.any():
            found.append(ReliabilityBin(float(score[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    return tuple(found)


def exit_histogram(counts: CycleCounts, layer: int, num_layers: int) -> dict[int, int]:
    """Tokens by exit layer: accepted drafts left at the checkpoint, all others after the last layer."""
    return {layer: counts.accepted, num_layers: counts.tokens - counts.accepted}


def _first_distance(candidate: CandidateTraces) -> tuple[Any, Any]:
    """Scores and agreement of all positions at distance 1, [P] each; a score that is no number is below all others."""
    empty_score, empty_right = np.zeros(0, np.float32), np.zeros(0, np.bool_)
    score = np.concatenate([empty_score, *(trace.score[0] for trace in candidate.sequences)])
    right = np.concatenate([empty_right, *(trace.agree[0] for trace in candidate.sequences)])
    return np.where(np.isfinite(score), score, np.float32(-np.inf)), right


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that JSON does not carry as they are."""
    return {
        "parts": tuple(PartSize(**part) for part in values["parts"]),
        "candidates": tuple(CandidateCurves(**_tuples(c)) for c in values["candidates"]),
        "acceptance": _numbers(values["acceptance"]),
        "risk": tuple(RiskChoice(**choice) for choice in values["risk"]),
        "fast": FastChoice(**values["fast"]) if values["fast"] else None,
        "predicted": _by_number(values["predicted"]),
        "exit_histogram": _by_number(values["exit_histogram"]),
        "reliability": tuple(ReliabilityBin(**entry) for entry in values["reliability"]),
        "verdict": tuple(values["verdict"]),
        "measured": tuple(Measured(**{**m, "speedups": _by_number(m["speedups"])}) for m in values["measured"]),
        "workers": tuple(WorkerTime(**worker) for worker in values.get("workers", ())),
        "notes": tuple(values["notes"]),
    }


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _numbers(value) if isinstance(value, list) else value for key, value in values.items()}


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _by_number(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in values.items()}
