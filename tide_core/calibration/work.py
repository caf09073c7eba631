"""The work of a calibration that needs the model, piece by piece. Each reads and writes files of the run and nothing
else, so it can be done by whoever has a workshop, and again by another one if that one dies.

    prompts/<round>-<nnnnn>.jsonl       prompts that the model made up
    shards/<part>-<nnnnn>.safetensors   token sequences
    train/candidates.safetensors        heads and routers, rounded as the artefact stores them
    train/state/, train/compared/       states of the two trainings, until the ledger knows that they are done
    risk/<part>.msgpack                 what they said on held-out sequences
    artefact/                           what is published
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tide_core.calibration.collect.collect import Unit, sequences_of
from tide_core.calibration.collect.shards import PARTS, ShardEntry, TokenShards, write_shard
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.crew import Workshop
from tide_core.calibration.data.self_prompts import MadeUp, PromptBatch, make_up
from tide_core.calibration.progress import Progress
from tide_core.calibration.report.data import Measured
from tide_core.calibration.report.publish import Findings, Published, publish
from tide_core.calibration.report.timing import NEW_TOKENS, Timer, held_out_prompts
from tide_core.calibration.risk.evaluate import evaluate
from tide_core.calibration.risk.traces import read_traces, write_traces
from tide_core.calibration.train.candidates import (
    Candidate,
    CandidateSpec,
    comparison_candidates,
    load_candidates,
    save_candidates,
)
from tide_core.calibration.train.train import STATE_NAME, fit
from tide_core.calibration.worker_time import WorkerTime
from tide_core.disk import write_whole
from tide_core.errors import ConfigError

ARTEFACT = "artefact"
CANDIDATES = "train/candidates.safetensors"
SHARDS = "shards"
SHORTLIST = "shortlist.safetensors"
STATES = f"train/state/{STATE_NAME}", f"train/compared/{STATE_NAME}"
HELD_OUT = ("test", "calibration", "given")

Digests = Mapping[str, str]
"""SHA-256 of shards by their name in the run."""


def make_prompts(workshop: Workshop, batch: PromptBatch, progress: Progress) -> ShardEntry:
    """A batch of prompts that the model makes up."""
    made = make_up(batch, workshop.config, workshop.tokenizer, workshop.generator, workshop.adapter.eos_ids)
    raw = "".join(f"{json.dumps([each.text, each.is_whole], ensure_ascii=False)}\n" for each in made).encode()
    write_whole(workshop.files.path(batch.name), raw)
    workshop.files.keep([batch.name])
    return ShardEntry(batch.name, hashlib.sha256(raw).hexdigest(), len(made), 0)


def read_prompts(raw: bytes) -> list[MadeUp]:
    return [MadeUp(*json.loads(line)) for line in raw.decode().split("\n")[:-1]]


def make_shard(workshop: Workshop, unit: Unit, progress: Progress) -> ShardEntry:
    """The sequences of one unit."""
    eos_ids = workshop.adapter.eos_ids
    made = sequences_of(unit, workshop.config, workshop.encoder, workshop.generator, workshop.lengths, eos_ids)
    entry = write_shard(workshop.files.path(unit.path).parent, unit.part, unit.index, made)
    workshop.files.keep([unit.path])
    return replace(entry, name=unit.path)


def train(workshop: Workshop, shards: Digests, progress: Progress) -> tuple[int, int]:
    """Candidates trained on the train part; returns its sequences and tokens. Goes on from a state that was left."""
    files, config, adapter, group = workshop.files, workshop.config, workshop.adapter, workshop.group
    workshop.generator.release()
    part, shortlist = _part(workshop, "train", shards), _shortlist(workshop)
    files.bring(STATES)

    def fitted(config: CalibrationConfig, state: str, specs: Sequence[CandidateSpec] | None = None) -> list[Candidate]:
        kept = {"resume_dir": files.path(state).parent, "on_saved": lambda: files.keep([state])}
        common = {"progress": progress, "group": group, "candidates": specs}
        return fit(config, adapter, part, shortlist, **kept, **common)  # type: ignore[arg-type]

    candidates = fitted(config, STATES[0])
    if config.compare_steps:  # plain heads along the depth, trained a little: what an exit is worth is seen beside them
        known = {candidate.name for candidate in candidates}
        specs = [spec for spec in comparison_candidates(adapter.num_layers) if spec.name not in known]
        candidates += fitted(replace(config, steps=config.compare_steps), STATES[1], specs)
    if group.rank == 0:
        save_candidates(files.path(CANDIDATES), [_rounded(candidate) for candidate in candidates])
        files.keep([CANDIDATES])
    return part.num_sequences, part.num_tokens


@dataclass(frozen=True, slots=True)
class RiskItem:
    part: str
    shards: Digests

    @property
    def path(self) -> str:
        return f"risk/{self.part}.msgpack"


def trace(workshop: Workshop, item: RiskItem, progress: Progress) -> None:
    """What the candidates say on a held-out part."""
    workshop.generator.release()
    found = evaluate(
        workshop.adapter,
        _candidates(workshop),
        _part(workshop, item.part, item.shards),
        _shortlist(workshop),
        workshop.config.max_drafts,
        progress=progress,
    )
    write_traces(workshop.files.path(item.path), found.traces)
    workshop.files.keep([item.path])


@dataclass(frozen=True, slots=True)
class PublishItem:
    shards: Mapping[str, Digests]
    """By part."""
    model_name: str
    data_kind: str
    coverage: float
    workers: Sequence[WorkerTime] = ()


def decide_and_save(workshop: Workshop, item: PublishItem, progress: Progress) -> Published:
    """The artefact in the folder of the run."""
    files = workshop.files
    parts = {part: _part(workshop, part, item.shards[part]) for part in PARTS}
    risks = {part: RiskItem(part, {}).path for part in HELD_OUT if parts[part].num_sequences}
    files.bring(risks.values())
    findings = Findings(
        config=workshop.config,
        identity=workshop.identity,
        model_name=item.model_name,
        data_kind=item.data_kind,
        shards=parts,
        traces={part: read_traces(files.folder / path) for part, path in risks.items()},
        candidates=_candidates(workshop),
        shortlist=_shortlist(workshop),
        coverage=item.coverage,
        workers=item.workers,
    )
    published = publish(findings, workshop.adapter, files.folder / ARTEFACT)
    files.replace(in_artefact(published))
    return published


@dataclass(frozen=True, slots=True)
class TimeItem:
    timer: Timer
    shards: Digests
    """Of the test part."""
    files: Sequence[str]
    """Of the artefact."""


def time_artefact(workshop: Workshop, item: TimeItem, progress: Progress) -> Measured:
    """The artefact of the run by the clock. The workshop's model is of no other use afterwards."""
    workshop.generator.release()
    workshop.files.bring(item.files)
    return item.timer(
        workshop.adapter.model,
        workshop.tokenizer,
        workshop.identity,
        workshop.files.folder / ARTEFACT,
        held_out_prompts(_part(workshop, "test", item.shards), NEW_TOKENS),
        batches=workshop.config.measure_batches,
        new_tokens=NEW_TOKENS,
        limit_s=workshop.config.measure_seconds,
        progress=progress,
    )


def in_artefact(published: Published) -> list[str]:
    """The files of the artefact by their names in the run."""
    return [f"{ARTEFACT}/{name}" for name in published.names]


def _part(workshop: Workshop, part: str, shards: Digests) -> TokenShards:
    workshop.files.bring(shards)
    return part_of(workshop.files.folder, part, shards, workshop.config.data)


def part_of(folder: Path, part: str, shards: Digests, data: str) -> TokenShards:
    """The sequences of one part, each shard as the ledger has it."""
    by_name = {name.removeprefix(f"{SHARDS}/"): digest for name, digest in shards.items()}
    found = TokenShards(folder / SHARDS, part, expected=by_name)
    if not found.num_sequences and part != "given":
        raise ConfigError("data", data, f"records with tokens; the {part} part has none")
    return found


def _shortlist(workshop: Workshop) -> Tensor:
    workshop.files.bring([SHORTLIST])
    return safetensors.torch.load((workshop.files.folder / SHORTLIST).read_bytes())["shortlist"]


def _candidates(workshop: Workshop) -> list[Candidate]:
    workshop.files.bring([CANDIDATES])
    return load_candidates(workshop.files.folder / CANDIDATES, workshop.adapter.device)


@torch.no_grad()
def _rounded(candidate: Candidate) -> Candidate:
    """With weights as an artefact stores them, so that what is measured is what will be served.

    A head's matrices are rounded to bfloat16 first, because that is how wide they are read where that is quicker."""
    for module in (candidate.head, candidate.router):
        for parameter in module.parameters():
            narrow = module is candidate.head and parameter.dim() == 2
            parameter.copy_((parameter.bfloat16() if narrow else parameter).half().float())
    return candidate
