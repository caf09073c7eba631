"""The numbers of a calibration report, and the functions that compute them from traces. Numpy only.

`ReportData` is everything that the report shows; it is stored as `report.json` next to the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tide_core.calibration.ledger import WorkerTime
from tide_core.calibration.risk.certify import Certified, Tried
from tide_core.calibration.risk.costs import Considered
from tide_core.calibration.risk.decide import DraftPlan, FastChoice, threshold_grid
from tide_core.calibration.risk.traces import CandidateTraces, agreement
from tide_core.errors import ConfigError
from tide_core.exits.artefact.contract import FastContract

FORMAT_VERSION = 1
RELIABILITY_BINS = 10


@dataclass(frozen=True, slots=True)
class PartSize:
    """The size of one part of the data."""

    name: str
    """train, calibration, test or given."""
    num_sequences: int
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class CandidateCurves:
    """The figures of one candidate."""

    name: str
    layer: int
    kind: str
    agreement: tuple[float, ...]
    """Share of positions at which the exit's token is the full-depth one, by distance."""
    thresholds: tuple[float, ...]
    """Thresholds of the two curves below, strict to loose."""
    coverage: tuple[float, ...]
    """Share of positions whose score reaches the threshold, at distance 1."""
    precision: tuple[float, ...]
    """Share of right tokens among these."""
    draft_threshold: float
    max_drafts: int
    speedup: float
    """Predicted at batch size 1."""
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
    """Timed speed-ups over full depth, by batch size, and the conditions of the measurement."""

    speedups: Mapping[int, float]
    conditions: str
    """Device, dtype, model, modes, lengths, repeats, versions."""
    left_out: str = ""
    """Which of the requested batch sizes were not timed, and why."""
    certified: Certified | None = None
    """Contracts of mode fast; None without fast exits."""

    def to_info(self, digest: str) -> dict[str, Any]:
        """The record in the ledger, with the digest of the artefact that was timed."""
        pairs = [[batch, speedup] for batch, speedup in self.speedups.items()]
        info = {"digest": digest, "speedups": pairs, "conditions": self.conditions, "left_out": self.left_out}
        return info if self.certified is None else {**info, "certified": asdict(self.certified)}

    @classmethod
    def from_info(cls, info: Mapping[str, Any] | None, digest: str) -> Measured | None:
        """The timings in the ledger if they are of this artefact."""
        if info is None or info["digest"] != digest:
            return None
        certified = None
        if (plain := info.get("certified")) is not None:
            contracts = [
                FastContract(**{**each, "thresholds": tuple(each["thresholds"])}) for each in plain["contracts"]
            ]
            certified = Certified(tuple(contracts), tuple(Tried(**each) for each in plain["tried"]))
        speedups = {batch: speedup for batch, speedup in info["speedups"]}
        return cls(speedups, info["conditions"], info["left_out"], certified)


@dataclass(frozen=True, slots=True)
class FastFigures:
    """Of the exits of mode fast."""

    layers: tuple[int, ...]
    """The draft head's first."""
    agreement: tuple[float | None, ...]
    """In training, with full depth; None for the draft head."""
    map_error: tuple[float, ...]
    """Of the skip map in training: mean square distance between unit states, over the layers behind the exit."""


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """How good the published exit was during its training."""

    steps: int
    minutes: float | None
    """None in a run without a limit on its time and without timings, whose report is the same every time."""
    tokens_per_pass: float
    """With a draft at every distance, on the batches of training just before."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that the report shows."""

    model: str
    architecture: str
    num_layers: int
    width: int
    vocab_size: int
    weights_digest: str
    tokenizer_digest: str
    tool_version: str
    command: str
    """The command that repeats the calibration."""
    settings: Mapping[str, str | int | float | bool | None]
    parts: tuple[PartSize, ...]
    shortlist_size: int
    shortlist_coverage: float
    candidates: tuple[CandidateCurves, ...]
    chosen: str
    acceptance: tuple[float, ...]
    """Of drafts by distance, under the chosen plan."""
    tokens_per_deep_pass: float
    fast: FastChoice | None
    predicted: Mapping[int, float]
    """Speed-up over full depth in mode verified, by batch size."""
    reliability: tuple[ReliabilityBin, ...]
    verdict: tuple[str, ...]
    measured: tuple[Measured, ...] = ()
    workers: tuple[WorkerTime, ...] = ()
    """Empty for a local run."""
    notes: tuple[str, ...] = field(default=())
    """Sentences after the verdict."""
    fast_exits: FastFigures | None = None
    curve: tuple[TrainingPoint, ...] = ()
    """Of the published exit; empty for runs of earlier versions."""
    considered: tuple[Considered, ...] = ()
    """Heads that were priced before training; empty where the settings left nothing to choose."""

    @property
    def chosen_candidate(self) -> CandidateCurves:
        for candidate in self.candidates:
            if candidate.name == self.chosen:
                return candidate
        raise ConfigError("chosen", self.chosen, f"one of {', '.join(c.name for c in self.candidates)}")

    def to_json(self) -> bytes:
        """Plain JSON; number keys become strings, and NaN and infinities become null."""
        document = {"format_version": FORMAT_VERSION, **_plain(asdict(self))}
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


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


def reliability(candidate: CandidateTraces) -> tuple[ReliabilityBin, ...]:
    """Positions in bins of their score at distance 1, bins of equal width; empty bins are left out."""
    score, right = _first_distance(candidate)
    kept = np.isfinite(score)
    score, right = score[kept], right[kept]
    bins = np.clip((score * RELIABILITY_BINS).astype(int), 0, RELIABILITY_BINS - 1)
    found = []
    for index in range(RELIABILITY_BINS):
        inside = bins == index
        if inside.any():
            found.append(ReliabilityBin(float(score[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    return tuple(found)


def _first_distance(candidate: CandidateTraces) -> tuple[Any, Any]:
    """Scores and agreement of all positions at distance 1, [P] each; a score that is not finite becomes -inf."""
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
