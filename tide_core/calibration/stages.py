"""The tasks of a calibration that run the model. Each reads and writes files of the run and nothing else, so any worker
can run it, and another one can repeat it if that worker dies.

    prompts/<round>-<nnnnn>.jsonl       prompts that the model wrote
    shards/<part>-<nnnnn>.safetensors   token sequences
    train/choice.json                   which candidates are trained, and why
    train/candidates.safetensors        heads and routers, rounded as the artefact stores them
    train/fast.safetensors              exits of mode fast, likewise
    train/state/                        state of the training, until the ledger has the finished stage
    risk/<part>.msgpack                 traces of the candidates on held-out sequences
    artefact/                           what is published
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from tide_core.calibration.collect.collect import Unit, sequences_of
from tide_core.calibration.collect.shards import PARTS, TokenShards, write_shard
from tide_core.calibration.data.self_prompts import PromptBatch, WrittenPrompt, write_prompts
from tide_core.calibration.executor import StageContext
from tide_core.calibration.ledger import ShardEntry, WorkerTime
from tide_core.calibration.progress import Progress
from tide_core.calibration.report.data import Measured
from tide_core.calibration.report.publish import Findings, Published, prices, publish
from tide_core.calibration.risk.certify import Goal
from tide_core.calibration.risk.decide import plan_candidates
from tide_core.calibration.risk.trace import trace_candidates
from tide_core.calibration.risk.traces import read_traces, write_traces
from tide_core.calibration.train.candidates import Candidate, CandidateSpec, load_candidates, save_candidates
from tide_core.calibration.train.choice import CandidateChoice, choose
from tide_core.calibration.train.fast import TrainedFast, fit_fast, load_fast, save_fast
from tide_core.calibration.train.train import STATE_NAME, CurvePoint, fit
from tide_core.disk import write_whole
from tide_core.errors import ConfigError
from tide_core.identity import ModelIdentity

ARTEFACT = "artefact"
CANDIDATES = "train/candidates.safetensors"
CHOICE = "train/choice.json"
FAST = "train/fast.safetensors"
SHARDS = "shards"
SHORTLIST = "shortlist.safetensors"
STATE = f"train/state/{STATE_NAME}"
HELD_OUT = ("test", "calibration", "given")
NEW_TOKENS = 48
"""Tokens per row when the published exits are timed."""

Digests = Mapping[str, str]
"""SHA-256 of shards by their name in the run."""


class Timer(Protocol):
    """Times mode `verified` against mode `full` in one engine with the artefact in a folder, and certifies mode fast.

    Calibration does not import the engine, so the caller passes a timer: `tide_core.evaluation.speedup.time_exits`."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        identity: ModelIdentity,
        artefact: Path,
        prompts: Sequence[Sequence[int]],
        *,
        batches: Sequence[int],
        new_tokens: int,
        limit_s: float,
        progress: Progress,
        fast: Goal | None = None,
    ) -> Measured:
        """Certifies the contracts of mode fast, too, if there is a goal. May replace the model's attention and modules;
        nothing else uses the model afterwards."""


@dataclass(frozen=True, slots=True)
class TrainItem:
    shards: Digests
    names: Sequence[str]
    """Of the candidates."""
    seconds: float | None = None
    """Maximum time of training, that of earlier starts included."""


@dataclass(frozen=True, slots=True)
class Trained:
    num_sequences: int
    num_tokens: int
    steps: int
    """Done, of those of the configuration."""
    curve: Sequence[CurvePoint] = ()


@dataclass(frozen=True, slots=True)
class FastItem:
    shards: Digests
    seconds: float | None = None
    """Maximum time of training."""


@dataclass(frozen=True, slots=True)
class TraceItem:
    part: str
    shards: Digests

    @property
    def path(self) -> str:
        return f"risk/{self.part}.msgpack"


@dataclass(frozen=True, slots=True)
class PublishItem:
    shards: Mapping[str, Digests]
    """By part."""
    model_name: str
    data_kind: str
    coverage: float
    workers: Sequence[WorkerTime] = ()
    steps: int | None = None
    """Of training, if the time for it was over before the last one."""
    curve: Sequence[CurvePoint] = ()


@dataclass(frozen=True, slots=True)
class MeasureItem:
    timer: Timer
    shards: Mapping[str, Digests]
    """By held-out part."""
    files: Sequence[str]
    """Of the artefact."""


def make_prompts(context: StageContext, batch: PromptBatch, progress: Progress) -> ShardEntry:
    """Stage dataset: a batch of prompts that the model writes."""
    prompts = write_prompts(batch, context.config, context.tokenizer, context.generator, context.adapter.eos_ids)
    lines = (json.dumps([each.text, each.is_whole], ensure_ascii=False) for each in prompts)
    raw = "".join(f"{line}\n" for line in lines).encode()
    write_whole(context.files.path(batch.name), raw)
    context.files.push([batch.name])
    return ShardEntry(batch.name, hashlib.sha256(raw).hexdigest(), len(prompts), 0)


def read_prompts(raw: bytes) -> list[WrittenPrompt]:
    return [WrittenPrompt(*json.loads(line)) for line in raw.decode().split("\n")[:-1]]


def make_shard(context: StageContext, unit: Unit, progress: Progress) -> ShardEntry:
    """Stage collect: the sequences of one unit."""
    eos_ids = context.adapter.eos_ids
    sequences = sequences_of(unit, context.config, context.encoder, context.generator, context.lengths, eos_ids)
    entry = write_shard(context.files.path(unit.path).parent, unit.part, unit.index, sequences)
    context.files.push([unit.path])
    return replace(entry, name=unit.path)


def choose_candidates(context: StageContext, item: None, progress: Progress) -> CandidateChoice:
    """Stage train, first: the candidates to train. A run chooses once: what an earlier start chose counts."""
    files = context.files
    with contextlib.suppress(ConfigError):  # damaged: it is made again
        if (made := _choice(context)) is not None:
            return made
    context.generator.release()
    choice = choose(context.config, context.adapter, len(_shortlist(context)), progress)
    write_whole(files.path(CHOICE), choice.to_json())
    files.push([CHOICE])
    return choice


def train(context: StageContext, item: TrainItem, progress: Progress) -> Trained:
    """Stage train: fit the candidates on the train part, from a saved state if there is one."""
    files = context.files
    context.generator.release()
    part = _part(context, "train", item.shards)
    files.pull([STATE])
    fitted = fit(
        context.config,
        context.adapter,
        part,
        _shortlist(context),
        progress=progress,
        resume_dir=files.path(STATE).parent,
        on_saved=lambda: files.push([STATE]),
        group=context.group,
        specs=[CandidateSpec.parse(name) for name in item.names],
        seconds=item.seconds,
    )
    if context.group.rank == 0:
        save_candidates(files.path(CANDIDATES), [_rounded(candidate) for candidate in fitted.candidates])
        files.push([CANDIDATES])
    return Trained(part.num_sequences, part.num_tokens, fitted.steps, tuple(fitted.curve))


def trace(context: StageContext, item: TraceItem, progress: Progress) -> None:
    """Stage risk: traces of the candidates on a held-out part."""
    context.generator.release()
    traces = trace_candidates(
        context.adapter,
        _candidates(context),
        _part(context, item.part, item.shards),
        _shortlist(context),
        context.config.max_drafts,
        progress=progress,
    )
    write_traces(context.files.path(item.path), traces)
    context.files.push([item.path])


def train_fast(context: StageContext, item: FastItem, progress: Progress) -> dict[str, float]:
    """Stage fast: fit the exits of mode fast behind the candidate that will be published; their figures in training."""
    context.generator.release()
    files, draft = context.files, _chosen(context)
    part = _part(context, "train", item.shards)
    trained = fit_fast(
        context.config, context.adapter, part, _shortlist(context), draft, progress=progress, seconds=item.seconds
    )
    save_fast(files.path(FAST), trained, draft.layer)
    files.push([FAST])
    return trained.losses


def write_artefact(context: StageContext, item: PublishItem, progress: Progress) -> Published:
    """Stage publish: decide, and write the artefact into the run."""
    files = context.files
    parts = {part: _part(context, part, item.shards[part]) for part in PARTS}
    traces = {part: TraceItem(part, {}).path for part in HELD_OUT if parts[part].num_sequences}
    files.pull(traces.values())
    findings = Findings(
        config=context.config,
        identity=context.identity,
        model_name=item.model_name,
        data_kind=item.data_kind,
        shards=parts,
        traces={part: read_traces(files.folder / path) for part, path in traces.items()},
        candidates=_candidates(context),
        shortlist=_shortlist(context),
        coverage=item.coverage,
        workers=item.workers,
        choice=_choice(context),
        steps=item.steps,
        curve=item.curve,
        fast=_fast(context),
    )
    published = publish(findings, context.adapter, files.folder / ARTEFACT)
    files.push_together(artefact_files(published))
    return published


def measure(context: StageContext, item: MeasureItem, progress: Progress) -> Measured:
    """Stage measure: time the artefact of the run. The context's model cannot be used afterwards."""
    context.generator.release()
    context.files.pull(item.files)
    return item.timer(
        context.adapter.model,
        context.tokenizer,
        context.identity,
        context.files.folder / ARTEFACT,
        held_out_prompts(_part(context, "test", item.shards["test"]), NEW_TOKENS),
        batches=context.config.measure_batches,
        new_tokens=NEW_TOKENS,
        limit_s=context.config.measure_seconds,
        progress=progress,
        fast=_goal(context, item.shards),
    )


def _goal(context: StageContext, shards: Mapping[str, Digests]) -> Goal | None:
    """What is to be certified of mode fast: on held-out prompts, people's where there are any, of every part alike."""
    config, fast = context.config, _fast(context)
    if fast is None or not config.fast_epsilons:
        return None
    parts = [_part(context, part, shards[part]) for part in ("calibration", "given") if shards[part]]
    share = -(-config.fast_answers // len(parts))
    chosen = [prompt for part in parts for prompt in prompts_of(part, share)]
    selection = prompts_of(_part(context, "test", shards["test"]), max(8, config.fast_answers // 4))
    most, room = config.fast_tokens, context.adapter.max_positions - config.fast_tokens
    fitting = [[prompt for prompt in prompts if len(prompt) <= room] for prompts in (selection, chosen)]
    num_exits = len(fast.record.exits) + 1
    return Goal(config.fast_epsilons, config.fast_delta, most, fitting[0], fitting[1], num_exits)


def prompts_of(shards: TokenShards, num: int) -> list[list[int]]:
    """At most `num` prompts, evenly spaced in the part."""
    total = shards.num_sequences
    indices = sorted({index * total // min(num, total) for index in range(min(num, total))})
    sequences = [shards.sequence(index) for index in indices]
    return [each.tokens[: each.prompt_len].tolist() for each in sequences]


def held_out_prompts(shards: TokenShards, new_tokens: int) -> list[list[int]]:
    """The prompts of one part whose answers have at least that many tokens, or all if there are none: a text that
    continues past its end is not what the exits were calibrated for."""
    sequences = [shards.sequence(index) for index in range(shards.num_sequences)]
    long = [each for each in sequences if len(each.tokens) - each.prompt_len >= new_tokens]
    return [each.tokens[: each.prompt_len].tolist() for each in long or sequences]


def artefact_files(published: Published) -> list[str]:
    """The files of the artefact by their names in the run."""
    return [f"{ARTEFACT}/{name}" for name in published.names]


def open_part(folder: Path, part: str, shards: Digests, data: str) -> TokenShards:
    """The sequences of one part; every shard must have the digest of the ledger."""
    by_name = {name.removeprefix(f"{SHARDS}/"): digest for name, digest in shards.items()}
    found = TokenShards(folder / SHARDS, part, expected=by_name)
    if not found.num_sequences and part != "given":
        raise ConfigError("data", data, f"records with tokens; the {part} part has none")
    return found


def _part(context: StageContext, part: str, shards: Digests) -> TokenShards:
    context.files.pull(shards)
    return open_part(context.files.folder, part, shards, context.config.data)


def _shortlist(context: StageContext) -> Tensor:
    context.files.pull([SHORTLIST])
    return safetensors.torch.load((context.files.folder / SHORTLIST).read_bytes())["shortlist"]


def _choice(context: StageContext) -> CandidateChoice | None:
    """None in a run whose training ended before choices were kept."""
    context.files.pull([CHOICE])
    path = context.files.folder / CHOICE
    return CandidateChoice.from_json(path.read_bytes()) if path.exists() else None


def _chosen(context: StageContext) -> Candidate:
    """The candidate that the test part selects."""
    candidates = _candidates(context)
    if len(candidates) == 1:
        return candidates[0]
    path = TraceItem("test", {}).path
    context.files.pull([path])
    traces = read_traces(context.files.folder / path)
    costs = prices(_choice(context), candidates, context.adapter, len(_shortlist(context)))
    best = plan_candidates(traces, costs, max_drafts=context.config.max_drafts)[0]
    return next(each for each in candidates if each.name == best.name)


def _fast(context: StageContext) -> TrainedFast | None:
    """None in a run without fast exits."""
    if not context.config.num_fast_steps:
        return None
    context.files.pull([FAST])
    draft, adapter = _chosen(context), context.adapter
    return load_fast(context.files.folder / FAST, draft.layer, adapter.num_layers, draft.head.spec.width)


def _candidates(context: StageContext) -> list[Candidate]:
    context.files.pull([CANDIDATES])
    return load_candidates(context.files.folder / CANDIDATES, context.adapter.device)


@torch.no_grad()
def _rounded(candidate: Candidate) -> Candidate:
    """With weights as an artefact stores them, so that the measured candidate is the served one.

    A head's matrices are rounded to bfloat16 first, because some kernels read them in that width."""
    for module in (candidate.head, candidate.router):
        for parameter in module.parameters():
            narrow = module is candidate.head and parameter.dim() == 2
            parameter.copy_((parameter.bfloat16() if narrow else parameter).half().float())
    return candidate
