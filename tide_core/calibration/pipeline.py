"""A calibration from nothing to a published artefact: dataset → collect → train → risk → publish → measure.

    <run>/dataset/<part>.jsonl          records of each part
    <run>/shards/<part>-*.safetensors   token sequences
    <run>/shortlist.safetensors         ids that an exit head can say
    <run>/train/candidates.safetensors  heads and routers, rounded as the artefact stores them
    <run>/risk/<part>.msgpack           what they said on held-out sequences

Every stage reads what the ones before have left on disk, so a run that was killed goes on where it was: finished stages
are checked against the ledger and skipped. A rerun that was not interrupted ends in the same bytes, but for what the
clock said: the last stage times the published exits and puts that into the report, which is no part of the digest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tide_core.calibration.candidates import Candidate, comparison_candidates, load_candidates, save_candidates
from tide_core.calibration.collect import Lengths, collect, plan
from tide_core.calibration.config import SELF_DATA, CalibrationConfig
from tide_core.calibration.dataset import RecordPool, gather, kind_of, split
from tide_core.calibration.encode import PromptEncoder
from tide_core.calibration.evaluate import evaluate
from tide_core.calibration.generation import Generator
from tide_core.calibration.ledger import Ledger, check_output, digest_of, locked
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.publish import Findings, Published, publish, publish_measured
from tide_core.calibration.report_data import Measured
from tide_core.calibration.self_prompts import add_self_prompts
from tide_core.calibration.shards import PARTS, ShardEntry, TokenShards, remove_others
from tide_core.calibration.shortlist import choose_shortlist, count_emitted, coverage_of
from tide_core.calibration.timing import NEW_TOKENS, Timer, as_info, held_out_prompts, of_info
from tide_core.calibration.traces import read_traces, write_traces
from tide_core.calibration.train import fit
from tide_core.disk import write_whole
from tide_core.errors import ConfigError
from tide_core.identity import ModelIdentity
from tide_core.models.adapter import ModelAdapter
from tide_core.models.one_line import one_line

HELD_OUT = ("test", "calibration", "given")


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Where the artefact is and what to expect of it."""

    artefact: Path
    report: Path
    verdict: tuple[str, ...]
    digest: str


def calibrate(
    config: CalibrationConfig,
    model: Any,
    tokenizer: Any,
    identity: ModelIdentity,
    *,
    run_dir: Path,
    publish_to: Path,
    progress: Progress | None = None,
    force: bool = False,
    model_name: str | None = None,
    timer: Timer | None = None,
) -> CalibrationResult:
    """Calibrate a loaded model, or go on with the run in `run_dir`. `force` replaces an artefact that is there.

    `model_name` is what the report's command calls the model. A `timer` measures the speed-up, and may leave the model
    with an engine's attention and modules; without one the report holds predictions only."""
    check_output(publish_to, run_dir, force=force)
    with locked(run_dir):
        run = _Run(config, model, tokenizer, identity, run_dir, progress or SilentProgress(), timer)
        return run.to(publish_to.absolute(), model_name or identity.name)


class _Run:
    def __init__(
        self,
        config: CalibrationConfig,
        model: Any,
        tokenizer: Any,
        identity: ModelIdentity,
        folder: Path,
        progress: Progress,
        timer: Timer | None,
    ) -> None:
        self._config, self._tokenizer, self._identity = config, tokenizer, identity
        self._folder, self._progress, self._timer = folder, progress, timer
        self._adapter = ModelAdapter(model, paged=False)
        config.checkpoints_for(self._adapter.num_layers)  # refused before any work
        eos_ids = self._adapter.eos_ids
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos_ids), 0)
        self._generator = Generator(self._adapter, pad_id=pad_id, batch=config.generation_batch)
        self._ledger = Ledger(folder, config, _facts(identity, self._adapter))

    def to(self, publish_to: Path, model_name: str) -> CalibrationResult:
        self._stage("dataset", self._make_dataset)
        self._stage("collect", self._collect)
        self._stage("train", self._train)
        self._stage("risk", self._measure)
        published, failure = self._time(self._publish(publish_to, model_name), publish_to)
        verdict = (*published.data.verdict, *failure)
        return CalibrationResult(publish_to, publish_to / published.report, verdict, published.digest)

    def _stage(self, name: str, work: Callable[[], tuple[list[Path], dict[str, Any]]]) -> None:
        """Do a stage unless it is done and its files are as it left them."""
        if self._ledger.info(name) is not None:
            fault = self._ledger.fault(name)
            if fault is None:
                self._progress.note(f"{name}: done before")
                return
            self._progress.note(f"{name}: {fault} is not as it was left; the stage is done again")
            self._ledger.reopen(name)
        outputs, info = work()
        digests = {str(path.relative_to(self._folder)): digest_of(path) or "" for path in outputs}
        self._ledger.finish(name, digests, info)

    def _make_dataset(self) -> tuple[list[Path], dict[str, Any]]:
        pool = gather(self._config)
        given: list[str] = []
        if self._config.data == SELF_DATA:
            given = pool.lines()
            eos_ids = self._adapter.eos_ids
            add_self_prompts(pool, self._config, self._tokenizer, self._generator, eos_ids, self._progress)
        parts = split(pool.lines(), self._config, given)
        for name in self._ledger.shards:  # of other records
            self._ledger.drop_shard(name)
        outputs = []
        for part, lines in parts.items():
            outputs.append(_file(self._folder / "dataset" / f"{part}.jsonl"))
            write_whole(outputs[-1], "".join(f"{line}\n" for line in lines).encode())
        sizes = ", ".join(f"{len(lines)} {part}" for part, lines in parts.items() if lines)
        self._progress.note(f"dataset: {sizes}{''.join(self._remarks(pool))}")
        counts = {"num_bad": pool.num_bad, "num_seen": pool.num_seen, "num_near": pool.num_near}
        return outputs, {"kind": kind_of(self._config.data), **counts}

    def _remarks(self, pool: RecordPool) -> Iterator[str]:
        """What was not taken."""
        if pool.num_bad:
            yield f"; {pool.num_bad} of {pool.num_seen} could not be used"
        if pool.num_near:
            yield f"; {pool.num_near} prompts of the model's dropped, each nearly another one"
        if self._config.data == SELF_DATA and len(pool) < self._config.num_samples:
            yield f"; {len(pool)} in all, {self._config.num_samples} were asked for"

    def _collect(self) -> tuple[list[Path], dict[str, Any]]:
        config, adapter, folder = self._config, self._adapter, self._folder / "shards"
        lengths = Lengths.of(config, adapter.max_positions)
        lines = {part: _lines(self._folder / "dataset" / f"{part}.jsonl") for part in PARTS}
        units = plan(config, lines, self._generator.batch)
        remove_others(folder, {unit.name for unit in units})
        shutil.rmtree(self._folder / "train", ignore_errors=True)  # of other sequences
        collect(
            units,
            config,
            PromptEncoder(self._tokenizer, lengths.prompt),
            self._generator,
            lengths,
            eos_ids=adapter.eos_ids,
            folder=folder,
            done=self._whole_shards(folder),
            on_shard=lambda entry: self._ledger.add_shard(
                entry.name, entry.sha256, entry.num_sequences, entry.num_tokens
            ),
            progress=self._progress,
        )
        self._generator.release()
        counts = {part: count_emitted(self._shards(part), adapter.vocab_size) for part in ("train", "test")}
        size, coverage = config.shortlist_size, config.shortlist_coverage
        ids = choose_shortlist(counts["train"], size=size, coverage=coverage, eos_ids=adapter.eos_ids)
        covered = coverage_of(ids, counts["test"])
        target = self._folder / "shortlist.safetensors"
        write_whole(target, safetensors.torch.save({"shortlist": ids}))
        self._progress.note(f"shortlist: {len(ids)} of {adapter.vocab_size} tokens, {covered:.2%} of held-out ones")
        return [*(folder / unit.name for unit in units), target], {"coverage": covered}

    def _whole_shards(self, folder: Path) -> dict[str, ShardEntry]:
        """Shards of the ledger that are on disk as they were written; the others are forgotten."""
        whole = {}
        for name, (sha256, num_sequences, num_tokens) in self._ledger.shards.items():
            if digest_of(folder / name) == sha256:
                whole[name] = ShardEntry(name, sha256, num_sequences, num_tokens)
            else:
                self._progress.note(f"collect: shard {name} is not as it was left; it is made again")
                self._ledger.drop_shard(name)
        return whole

    def _train(self) -> tuple[list[Path], dict[str, Any]]:
        state = self._folder / "train" / "state"
        shards = self._shards("train")
        candidates = fit(
            self._config, self._adapter, shards, self._shortlist(), progress=self._progress, resume_dir=state
        )
        candidates += self._compare(shards, {candidate.name for candidate in candidates})
        target = _file(self._folder / "train" / "candidates.safetensors")
        save_candidates(target, [_rounded(candidate) for candidate in candidates])
        shutil.rmtree(state, ignore_errors=True)
        return [target], {"num_sequences": shards.num_sequences, "num_tokens": shards.num_tokens}

    def _compare(self, shards: TokenShards, known: set[str]) -> list[Candidate]:
        """Plain heads along the depth, trained a little: what an exit is worth is seen beside them."""
        specs = [spec for spec in comparison_candidates(self._adapter.num_layers) if spec.name not in known]
        if not self._config.compare_steps:
            return []
        config = replace(self._config, steps=self._config.compare_steps)
        return fit(config, self._adapter, shards, self._shortlist(), progress=self._progress, candidates=specs)

    def _measure(self) -> tuple[list[Path], dict[str, Any]]:
        candidates, shortlist = self._candidates(), self._shortlist()
        outputs = []
        for part in HELD_OUT:
            shards = self._shards(part)
            if not shards.num_sequences:
                continue
            found = evaluate(
                self._adapter, candidates, shards, shortlist, self._config.max_drafts, progress=self._progress
            )
            outputs.append(_file(self._folder / "risk" / f"{part}.msgpack"))
            write_traces(outputs[-1], found.traces)
        return outputs, {}

    def _publish(self, publish_to: Path, model_name: str) -> Published:
        shards = {part: self._shards(part) for part in PARTS}
        dataset, collected = self._ledger.info("dataset"), self._ledger.info("collect")
        assert dataset is not None
        assert collected is not None
        findings = Findings(
            config=self._config,
            identity=self._identity,
            model_name=model_name,
            data_kind=dataset["kind"],
            shards=shards,
            traces={
                part: read_traces(self._folder / "risk" / f"{part}.msgpack")
                for part in HELD_OUT
                if shards[part].num_sequences
            },
            candidates=self._candidates(),
            shortlist=self._shortlist(),
            coverage=collected["coverage"],
        )
        self._ledger.note_publishing(publish_to)
        published = publish(findings, self._adapter, publish_to)
        self._ledger.finish("publish", {}, {"digest": published.digest})
        self._progress.note(f"publish: {publish_to} is whole ({published.digest[:16]})")
        return published

    def _time(self, published: Published, target: Path) -> tuple[Published, tuple[str, ...]]:
        """The published exits by the clock, in the report; or why not. The artefact is whole whatever happens here."""
        if self._timer is None or not self._config.measure_batches:
            return published, ()
        kept = "the artefact is published, its report holds predictions only, and the same command measures again"
        try:
            measured = of_info(self._ledger.info("measure"), published.digest)
            if measured is None:
                measured = self._clock(self._timer, target)
                self._ledger.finish("measure", {}, as_info(measured, published.digest))
            else:
                self._progress.note("measure: done before")
            return publish_measured(published, measured, target), ()
        except Exception as error:  # of the engine, the device, the disk: none of them is worth the calibration
            return published, (f"not measured: {one_line(error)}; {kept}",)
        except BaseException:
            self._progress.note(f"measure: interrupted; {kept}")
            raise

    def _clock(self, timer: Timer, artefact: Path) -> Measured:
        self._generator.release()
        return timer(
            self._adapter.model,
            self._tokenizer,
            self._identity,
            artefact,
            held_out_prompts(self._shards("test"), NEW_TOKENS),
            batches=self._config.measure_batches,
            new_tokens=NEW_TOKENS,
            limit_s=self._config.measure_seconds,
            progress=self._progress,
        )

    def _shards(self, part: str) -> TokenShards:
        names = {name: entry[0] for name, entry in self._ledger.shards.items() if name.startswith(f"{part}-")}
        shards = TokenShards(self._folder / "shards", part, expected=names)
        if not shards.num_sequences and part != "given":
            raise ConfigError("data", self._config.data, f"records with tokens; the {part} part has none")
        return shards

    def _shortlist(self) -> Tensor:
        return safetensors.torch.load((self._folder / "shortlist.safetensors").read_bytes())["shortlist"]

    def _candidates(self) -> list[Candidate]:
        return load_candidates(self._folder / "train" / "candidates.safetensors", self._adapter.device)


def _facts(identity: ModelIdentity, adapter: ModelAdapter) -> Mapping[str, Any]:
    """What must be the same when a run goes on."""
    facts = {key: value for key, value in asdict(identity).items() if key not in ("name", "weights_sample")}
    sample = [[name, list(values)] for name, values in sorted(identity.weights_sample.items())]
    return {**facts, "weights_sample": sample, "device": adapter.device.type}


@torch.no_grad()
def _rounded(candidate: Candidate) -> Candidate:
    """With weights as an artefact stores them, so that what is measured is what will be served.

    A head's matrices are rounded to bfloat16 first, because that is how wide they are read where that is quicker."""
    for module in (candidate.head, candidate.router):
        for parameter in module.parameters():
            narrow = module is candidate.head and parameter.dim() == 2
            parameter.copy_((parameter.bfloat16() if narrow else parameter).half().float())
    return candidate


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]
