"""Stage publish: decide, then write manifest, weights and report as an artefact."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tide_core.calibration.collect.shards import PARTS, TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.ledger import WorkerTime
from tide_core.calibration.report.data import (
    FastFigures,
    Measured,
    PartSize,
    ReportData,
    TrainingPoint,
    candidate_curves,
    reliability,
)
from tide_core.calibration.report.report import TEXT, add_measured, render_report
from tide_core.calibration.risk.costs import Costs, costs_of
from tide_core.calibration.risk.decide import Decision, decide, traces_of
from tide_core.calibration.risk.traces import CandidateTraces
from tide_core.calibration.train.candidates import Candidate
from tide_core.calibration.train.choice import CandidateChoice
from tide_core.calibration.train.fast import TrainedFast
from tide_core.calibration.train.train import CurvePoint
from tide_core.exits.artefact.artefact import (
    HEADS_FILE,
    MANIFEST_FILE,
    Checkpoint,
    DataSummary,
    FastPoint,
    Manifest,
    replace_reports,
    save_artefact,
)
from tide_core.identity import ModelIdentity
from tide_core.models.adapter import ModelAdapter

MOST_CURVE_POINTS = 8
NOTE = (
    "Exits were compared on the test part. What is stated of the published one was measured on the calibration part, "
    "which nothing before had seen."
)
GIVEN_NOTE = (
    "Mode `fast` was measured on two parts, each alone: answers to prompts of the model's own and answers to prompts"
    " that people wrote. Its numbers are those of the part on which more tokens disagree."
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of the earlier stages."""

    config: CalibrationConfig
    identity: ModelIdentity
    model_name: str
    """The name for the command in the report."""
    data_kind: str
    """How the artefact describes its data."""
    shards: Mapping[str, TokenShards]
    traces: Mapping[str, Sequence[CandidateTraces]]
    """By held-out part."""
    candidates: Sequence[Candidate]
    shortlist: Tensor
    coverage: float
    """Share of held-out tokens in the shortlist."""
    workers: Sequence[WorkerTime] = ()
    choice: CandidateChoice | None = None
    """How the candidates were chosen."""
    steps: int | None = None
    """Of training, if the time for it was over before the last one."""
    curve: Sequence[CurvePoint] = ()
    fast: TrainedFast | None = None


@dataclass(frozen=True, slots=True)
class Published:
    digest: str
    report: str
    """Name of the file in the artefact."""
    data: ReportData
    """The numbers of the report, and the verdict."""
    names: tuple[str, ...]
    """All files of the artefact, its manifest last."""


def publish(findings: Findings, adapter: ModelAdapter, target: Path) -> Published:
    """Decide, and write the artefact to `target` atomically."""
    costs = prices(findings.choice, findings.candidates, adapter, len(findings.shortlist))
    on_cuda = adapter.device.type == "cuda"
    decision = decide(findings.config, findings.traces, costs, adapter.num_layers, in_cycles=on_cuda)
    chosen = next(each for each in findings.candidates if each.name == decision.best.name)
    manifest = manifest_of(findings, decision, chosen)
    data = report_of(findings, decision, manifest.tool_version)
    reports = render_report(data)
    fast = None if findings.fast is None else findings.fast.modules
    digest = save_artefact(target, manifest, [chosen.head], [chosen.router], findings.shortlist, reports, fast)
    return Published(digest, TEXT, data, _names(reports))


def prices(
    choice: CandidateChoice | None, candidates: Sequence[Candidate], adapter: ModelAdapter, shortlist_size: int
) -> dict[str, Costs]:
    """What every candidate costs: measured where a choice measured it."""
    measured = None if choice is None else choice.costs
    return {
        each.name: costs_of(each, adapter, shortlist_size) if measured is None else measured[each.name]
        for each in candidates
    }


def publish_measured(published: Published, measured: Measured, target: Path) -> Published:
    """Replace the report at `target` by one with timings, and add the contracts of mode fast that were certified; the
    exits stay the same, and without contracts the digest as well."""
    data = add_measured(published.data, measured)
    reports = render_report(data)
    contracts = () if measured.certified is None else measured.certified.contracts
    digest = replace_reports(target, reports, contracts)
    assert contracts or digest == published.digest
    return Published(digest, published.report, data, _names(reports))


def _names(reports: Mapping[str, bytes]) -> tuple[str, ...]:
    return (HEADS_FILE, *reports, MANIFEST_FILE)


def manifest_of(findings: Findings, decision: Decision, chosen: Candidate) -> Manifest:
    best, fast, shards = decision.best, decision.fast, findings.shards
    point = None
    if fast is not None and findings.fast is None:
        point = FastPoint(fast.threshold, fast.disagreement, fast.layers_per_token, fast.num_sequences)
    checkpoint = Checkpoint(
        layer=chosen.layer,
        head=chosen.head.spec,
        router_bottleneck=chosen.router.out.in_features,
        acceptance=decision.acceptance,
        draft_threshold=best.draft_threshold,
        fast=point,
    )
    digests = "".join(f"{part} {shards[part].digest}\n" for part in PARTS)
    return Manifest(
        model=findings.identity,
        checkpoints=(checkpoint,),
        max_drafts=best.max_drafts,
        shortlist_size=len(findings.shortlist),
        shortlist_coverage=findings.coverage,
        fast=None if findings.fast is None else findings.fast.record,
        data=DataSummary(
            kind=findings.data_kind,
            digest=hashlib.sha256(digests.encode()).hexdigest(),
            num_train_tokens=shards["train"].num_tokens,
            num_train_sequences=shards["train"].num_sequences,
            num_calibration_sequences=shards["calibration"].num_sequences + shards["given"].num_sequences,
            num_test_sequences=shards["test"].num_sequences,
        ),
    )


def report_of(findings: Findings, decision: Decision, tool_version: str) -> ReportData:
    identity, best, shards = findings.identity, decision.best, findings.shards
    compared, stated = findings.traces["test"], traces_of(findings.traces["calibration"], best.name)
    settings = {**findings.config.to_mapping(), "data": findings.data_kind}
    return ReportData(
        model=identity.name,
        architecture=identity.architecture,
        num_layers=identity.num_layers,
        width=identity.width,
        vocab_size=identity.vocab_size,
        weights_digest=identity.weights_sha256 or "",
        tokenizer_digest=identity.tokenizer_sha256,
        tool_version=tool_version,
        command=command_of(findings),
        settings={name: _plain(value) for name, value in settings.items()},
        parts=tuple(
            PartSize(part, shards[part].num_sequences, shards[part].num_tokens, shards[part].digest)
            for part in PARTS
            if shards[part].num_sequences
        ),
        shortlist_size=len(findings.shortlist),
        shortlist_coverage=findings.coverage,
        candidates=tuple(candidate_curves(traces_of(compared, plan.name), plan) for plan in decision.plans),
        chosen=best.name,
        acceptance=decision.acceptance,
        tokens_per_deep_pass=best.counts.tokens_per_deep_pass,
        fast=decision.fast if findings.fast is None else None,
        fast_exits=None if findings.fast is None else _fast_figures(findings.fast, best.layer),
        predicted=decision.speedups,
        reliability=reliability(stated),
        verdict=decision.verdict,
        workers=tuple(findings.workers),
        notes=notes_of(findings),
        curve=curve_of(findings, best.name),
        considered=() if findings.choice is None else findings.choice.considered,
    )


def curve_of(findings: Findings, name: str) -> tuple[TrainingPoint, ...]:
    """At most `MOST_CURVE_POINTS` of a candidate, evenly spaced, the last one among them."""
    config, points = findings.config, [point for point in findings.curve if name in point.tokens_per_pass]
    timed = config.minutes is not None or bool(config.measure_batches)
    count = min(len(points), MOST_CURVE_POINTS)
    chosen = [points[len(points) * number // count - 1] for number in range(1, count + 1)]
    return tuple(
        TrainingPoint(point.steps, point.seconds / 60.0 if timed else None, point.tokens_per_pass[name])
        for point in chosen
    )


def _fast_figures(fast: TrainedFast, first: int) -> FastFigures:
    layers = (first, *(each.layer for each in fast.record.exits))
    return FastFigures(
        layers,
        tuple(fast.losses.get(f"agreement_{layer}") for layer in layers),
        tuple(fast.losses[f"map_{layer}"] for layer in layers),
    )


def notes_of(findings: Findings) -> tuple[str, ...]:
    config = findings.config
    notes = [NOTE, GIVEN_NOTE] if "given" in findings.traces else [NOTE]
    if findings.steps is not None:
        limit = f"the time for the run, {config.minutes:g} minutes"
        notes.append(f"Training ended after {findings.steps} of {config.steps} steps: {limit}, was spent.")
    return tuple(notes)


def command_of(findings: Findings) -> str:
    """The command that repeats the calibration, with placeholders for local files and the output."""
    usual = CalibrationConfig().to_mapping()
    changed = {key: value for key, value in findings.config.to_mapping().items() if value != usual[key]}
    if "data" in changed and changed["data"] != findings.data_kind:
        changed["data"] = "FILES"
    words = ["tide", "calibrate", "--model", findings.model_name, "--output", "OUTPUT"]
    for key, value in changed.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join(words)


def _plain(value: object) -> str | int | float | bool | None:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
