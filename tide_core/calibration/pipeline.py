"""A calibration from a loaded model to a published artefact: dataset → collect → train → risk → fast →
publish → measure.

    <run>/ledger.msgpack         settings, and the digest of everything that is done
    <run>/dataset/<part>.jsonl   records of each part
    <run>/shortlist.safetensors  token ids that an exit head can emit
    <run>/...                    see stages.py

This module holds what needs no model: the order of the stages, the plan, the ledger. An executor runs the rest. Every
stage reads files that earlier stages have written, so a run that was killed resumes: finished stages are checked
against the ledger and skipped. A repeated run ends in the same bytes, except for the timings of the last stage, which
go into the report; the digest of the artefact does not cover reports.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from tide_core.calibration import stages
from tide_core.calibration.collect.collect import Unit, choose_shortlist, count_emitted, coverage_of, plan
from tide_core.calibration.collect.shards import PARTS, TokenShards, remove_others
from tide_core.calibration.config import SELF_DATA, CalibrationConfig
from tide_core.calibration.data.dataset import RecordPool, gather, hash_of, kind_of, source_of, split
from tide_core.calibration.data.self_prompts import PromptBatch, WrittenPrompt, add_self_prompts
from tide_core.calibration.executor import Executor, IsOver, LocalExecutor, ModelInfo, StageContext
from tide_core.calibration.ledger import (
    Ledger,
    RunFiles,
    ShardEntry,
    WorkerTime,
    add_worker_times,
    check_output,
    digest_of,
    locked,
)
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.report.data import Measured
from tide_core.calibration.report.publish import Published, publish_measured
from tide_core.calibration.stages import Timer
from tide_core.calibration.train.train import CurvePoint
from tide_core.disk import write_whole
from tide_core.errors import ConfigError, one_line
from tide_core.exits.artefact.artefact import install_artefact
from tide_core.identity import ModelIdentity

SHARE_OF_PROMPTS = 0.12
"""Of a limit on the time of a run: past it no more prompts are written, however many are wanted."""
SHARE_OF_DATA = 0.45
"""Of the same: past it no more sequences are collected for training. Those of the held-out parts come first."""
SHARE_AFTER_TRAINING = 0.08
"""Of a limit on the time of a run: for traces and the decision."""
SHARE_OF_TIMING = 0.12
"""Of the same: for timing, where it is wanted."""
SHARE_OF_FAST_EXITS = 0.1
"""Of the time for training: for the exits of mode fast, which are trained after the others."""
LEAST_TRAINING_SHARE = 0.1
"""Of the same: for training, whatever the stages before it took."""

Outputs = tuple[Sequence[str], dict[str, Any]]
"""Files of a finished stage by their names in the run, and what the ledger records about it."""


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The published artefact and its verdict."""

    artefact: Path
    report: Path
    verdict: tuple[str, ...]
    digest: str
    workers: tuple[WorkerTime, ...] = ()
    """The work of each worker, over all drivers of the run; empty for a local run."""


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
    """Calibrate a loaded model in this process, or resume the run in `run_dir`. `force` replaces an existing artefact.

    The command in the report calls the model `model_name`. A `timer` measures the speed-up and may leave the model with
    an engine's attention and modules; without one the report holds predictions only."""
    check_output(publish_to, run_dir, force=force)
    with locked(run_dir):
        files = RunFiles(run_dir)
        executor = LocalExecutor(StageContext(config, model, tokenizer, identity, files))
        pipeline = Pipeline(config, executor, files, progress or SilentProgress())
        return pipeline.run(publish_to=publish_to, model_name=model_name or identity.name, timer=timer)


class Pipeline:
    """One run. The caller makes sure that no other process works on it."""

    def __init__(self, config: CalibrationConfig, executor: Executor, files: RunFiles, progress: Progress) -> None:
        self._config, self._executor, self._files, self._progress = config, executor, files, progress
        self._model = executor.model_info
        self._ledger = Ledger(files, config, _model_record(self._model), source_of(config))
        self._earlier_workers = self._ledger.workers
        self._started = time.monotonic()

    def run(self, *, publish_to: Path, model_name: str, timer: Timer | None) -> CalibrationResult:
        """All stages in order."""
        publish_to = publish_to.absolute()
        self._stage("dataset", self._make_dataset)
        self._stage("collect", self._collect)
        self._stage("train", self._train)
        self._remove([stages.STATE])  # only after the ledger has the trained candidates
        self._stage("risk", self._trace)
        if self._config.num_fast_steps:
            self._stage("fast", self._train_fast)
        published = self._publish(publish_to, model_name)
        published, failure = self._measure(published, publish_to, timer)
        verdict = (*published.data.verdict, *failure)
        workers = tuple(self._workers())
        return CalibrationResult(publish_to, publish_to / published.report, verdict, published.digest, workers)

    def _stage(self, name: str, run: Callable[[], Outputs]) -> None:
        """Run a stage unless the ledger has it and its files are unchanged."""
        if self._ledger.info(name) is not None:
            changed = self._ledger.changed_file(name)
            if changed is None:
                self._progress.note(f"{name}: done before")
                return
            self._progress.note(f"{name}: {changed} is missing or has changed; the stage runs again")
            self._ledger.reopen(name)
        outputs, info = run()
        self._files.pull(outputs)
        shards = self._ledger.shards  # their digests as written: a shard that changed since is found by the next run
        digests = {
            path: shards[path].sha256 if path in shards else digest_of(self._files.folder / path) or ""
            for path in outputs
        }
        self._ledger.finish(name, digests, info, self._workers())

    # dataset

    def _make_dataset(self) -> Outputs:
        pool = gather(self._config)
        if source_of(self._config) != self._ledger.data:
            raise ConfigError("data", self._config.data, "files that do not change while they are read")
        given: list[str] = []
        if self._config.data == SELF_DATA:
            given = pool.lines()
            add_self_prompts(pool, self._config, self._write_prompts, self._model.generation_batch, self._progress)
        parts = split(pool.lines(), self._config, given)
        for name in self._ledger.shards:  # of other records
            if not name.startswith("prompts/"):
                self._ledger.drop_shard(name)
        outputs = []
        for part, lines in parts.items():
            outputs.append(_records(part))
            write_whole(self._files.path(outputs[-1]), "".join(f"{line}\n" for line in lines).encode())
        self._files.push(outputs)
        sizes = ", ".join(f"{len(lines)} {part}" for part, lines in parts.items() if lines)
        self._progress.note(f"dataset: {sizes}{''.join(self._left_out(pool))}")
        counts = {"num_bad": pool.num_bad, "num_seen": pool.num_seen, "num_near": pool.num_near}
        return outputs, {"kind": kind_of(self._config.data), **counts}

    def _write_prompts(self, batches: Sequence[PromptBatch]) -> Iterator[list[WrittenPrompt]]:
        """The prompts of every batch that there is time for, in the order of the batches."""
        done = self._intact([batch.name for batch in batches])
        missing = [batch for batch in batches if batch.name not in done]
        is_over = self._past(SHARE_OF_PROMPTS)
        if is_over() and any(name.startswith("prompts/") for name in self._ledger.shards):
            missing = []  # of a later round
        for _, entry in self._executor.map_unordered(stages.make_prompts, missing, is_over):
            self._ledger.add_shard(entry, self._workers())
            done[entry.name] = entry
        self._files.pull(done)
        for batch in batches:
            if batch.name in done:
                yield stages.read_prompts((self._files.folder / batch.name).read_bytes())

    def _left_out(self, pool: RecordPool) -> Iterator[str]:
        if pool.num_bad:
            yield f"; {pool.num_bad} of {pool.num_seen} could not be used"
        if pool.num_near:
            yield f"; {pool.num_near} near-duplicate prompts of the model dropped"
        if self._config.data == SELF_DATA and len(pool) < self._config.num_samples:
            yield f"; {len(pool)} of the requested {self._config.num_samples}"

    # collect

    def _collect(self) -> Outputs:
        records = [_records(part) for part in PARTS]
        self._files.pull(records)
        lines = {part: _lines(self._files.folder / path) for part, path in zip(PARTS, records, strict=True)}
        units = plan(self._config, lines, self._model.generation_batch)
        paths = [unit.path for unit in units]
        remove_others(self._files.folder / stages.SHARDS, {Path(path).name for path in paths})
        self._remove([stages.CANDIDATES, stages.STATE])  # of other sequences
        made = self._make_shards(units)
        coverage = self._write_shortlist()
        return [*(path for path in paths if path in made), stages.SHORTLIST], {"coverage": coverage}

    def _make_shards(self, units: Sequence[Unit]) -> set[str]:
        """The shards of all units; returns their paths. Where the time is limited, train units come last: as many as
        there is time for, at least one. Neighbours have texts of similar length, so they are mixed, alike each time."""
        made = {*self._intact([unit.path for unit in units])}
        total = sum(len(unit.records) for unit in units)
        missing = [unit for unit in units if unit.path not in made]
        done, num_tokens = total - sum(len(unit.records) for unit in missing), 0
        held_out = {unit.path for unit in units if unit.part != "train"}
        is_past = self._past(SHARE_OF_DATA)
        if self._config.minutes is not None:
            missing.sort(key=lambda unit: (unit.part == "train", hash_of(self._config.seed, "order", unit.path)))
        with self._progress.stage("collect", total, "sequence", done) as stage:
            for unit, entry in self._executor.map_unordered(
                stages.make_shard, missing, lambda: is_past() and made > held_out
            ):
                self._ledger.add_shard(entry, self._workers())
                made.add(entry.name)
                num_tokens += entry.num_tokens
                done += len(unit.records)
                restarts = {"restarts": self._executor.num_restarts} if self._executor.num_restarts else {}
                stage.update(len(unit.records), shard=Path(entry.name).stem, tokens=num_tokens, **restarts)
        if done < total:
            self._progress.note(f"collect: {done} of {total} sequences in the time for them")
        return made

    def _write_shortlist(self) -> float:
        """Choose it from the train part; returns its coverage of the test part."""
        vocab_size = self._model.vocab_size
        counts = {part: count_emitted(self._open_part(part), vocab_size) for part in ("train", "test")}
        size, coverage = self._config.shortlist_size, self._config.shortlist_coverage
        ids = choose_shortlist(counts["train"], size=size, coverage=coverage, eos_ids=self._model.eos_ids)
        covered = coverage_of(ids, counts["test"])
        write_whole(self._files.path(stages.SHORTLIST), safetensors.torch.save({"shortlist": ids}))
        self._files.push([stages.SHORTLIST])
        self._progress.note(f"shortlist: {len(ids)} of {vocab_size} tokens, {covered:.2%} of held-out ones")
        return covered

    # train

    def _train(self) -> Outputs:
        choice = self._executor.run(stages.choose_candidates, None, self._progress)
        fast_share = SHARE_OF_FAST_EXITS if self._config.num_fast_steps else 0.0
        item = stages.TrainItem(self._digests("train"), choice.names, self._training_seconds(1.0 - fast_share))
        trained = self._executor.train(stages.train, item, self._progress)
        if trained.steps < self._config.steps:
            self._progress.note(f"train: the time is over after {trained.steps} of {self._config.steps} steps")
        return [stages.CHOICE, stages.CANDIDATES], asdict(trained)

    def _past(self, share: float) -> IsOver:
        """Whether this start has taken that share of the time for the run."""
        minutes = self._config.minutes
        if minutes is None:
            return lambda: False
        return lambda: time.monotonic() - self._started > share * minutes * 60.0

    def _training_seconds(self, share: float = 1.0) -> float | None:
        """A share of what is left of the time for the whole run, less that for the stages after training; never
        nothing."""
        if self._config.minutes is None:
            return None
        whole = self._config.minutes * 60.0
        after = SHARE_AFTER_TRAINING + (SHARE_OF_TIMING if self._config.measure_batches else 0.0)
        left = whole * (1.0 - after) - (time.monotonic() - self._started)
        return max(left * share, whole * LEAST_TRAINING_SHARE)

    # risk

    def _trace(self) -> Outputs:
        items = [stages.TraceItem(part, self._digests(part)) for part in stages.HELD_OUT]
        items = [item for item in items if item.shards]
        for item in items:
            self._executor.run(stages.trace, item, self._progress)
        return [item.path for item in items], {}

    # fast

    def _train_fast(self) -> Outputs:
        item = stages.FastItem(self._digests("train"), self._training_seconds())
        return [stages.FAST], self._executor.run(stages.train_fast, item, self._progress)

    # publish

    def _publish(self, publish_to: Path, model_name: str) -> Published:
        dataset, collected, trained = (self._ledger.info(stage) for stage in ("dataset", "collect", "train"))
        assert dataset is not None
        assert collected is not None
        assert trained is not None
        steps: int = trained.get("steps", self._config.steps)  # older runs do not have it
        item = stages.PublishItem(
            shards={part: self._digests(part) for part in PARTS},
            model_name=model_name,
            data_kind=dataset["kind"],
            coverage=collected["coverage"],
            workers=self._workers(),
            steps=steps if steps < self._config.steps else None,
            curve=[CurvePoint(**point) for point in trained.get("curve", ())],
        )
        published = self._executor.run(stages.write_artefact, item, self._progress)
        self._files.pull(stages.artefact_files(published))
        self._ledger.record_publishing(publish_to)
        install_artefact(self._files.folder / stages.ARTEFACT, publish_to)
        self._ledger.finish("publish", {}, {"digest": published.digest}, self._workers())
        self._progress.note(f"publish: {publish_to} is complete ({published.digest[:16]})")
        return published

    # measure

    def _measure(self, published: Published, target: Path, timer: Timer | None) -> tuple[Published, tuple[str, ...]]:
        """Add timings of the published exits to the report, or return the reason why not as a line of the verdict."""
        if timer is None or not self._config.measure_batches:
            return published, ()
        kept = "the artefact is published, its report holds predictions only, and the same command measures again"
        try:
            measured = Measured.from_info(self._ledger.info("measure"), published.digest)
            if measured is None:
                shards = {part: self._digests(part) for part in stages.HELD_OUT}
                item = stages.MeasureItem(timer, shards, stages.artefact_files(published))
                measured = self._executor.run(stages.measure, item, self._progress)
                self._ledger.finish("measure", {}, measured.to_info(published.digest), self._workers())
            else:
                self._progress.note("measure: done before")
            published = publish_measured(published, measured, self._files.folder / stages.ARTEFACT)
            self._files.push_together(stages.artefact_files(published))
            install_artefact(self._files.folder / stages.ARTEFACT, target)
            return published, ()
        except Exception as error:  # of the engine, the device, the disk: none of them undoes the calibration
            return published, (f"not measured: {one_line(error)}; {kept}",)
        except BaseException:
            self._progress.note(f"measure: interrupted; {kept}")
            raise

    # files of the run

    def _intact(self, names: Sequence[str]) -> dict[str, ShardEntry]:
        """The shards that the ledger has and that are unchanged on disk; the ledger drops the others."""
        known = {name: entry for name, entry in self._ledger.shards.items() if name in set(names)}
        self._files.pull(known)
        intact = {}
        for name, entry in known.items():
            if digest_of(self._files.folder / name) == entry.sha256:
                intact[name] = entry
            else:
                self._progress.note(f"shard {name} is missing or has changed; it is made again")
                self._ledger.drop_shard(name)
        return intact

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._files.path(name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                path.parent.rmdir()
        self._files.push(names)

    def _digests(self, part: str) -> dict[str, str]:
        prefix = f"{stages.SHARDS}/{part}-"
        return {name: entry.sha256 for name, entry in self._ledger.shards.items() if name.startswith(prefix)}

    def _open_part(self, part: str) -> TokenShards:
        shards = self._digests(part)
        self._files.pull(shards)
        return stages.open_part(self._files.folder, part, shards, self._config.data)

    def _workers(self) -> list[WorkerTime]:
        return add_worker_times(self._earlier_workers, self._executor.worker_times())


def _model_record(model: ModelInfo) -> Mapping[str, Any]:
    """What must be the same when a run resumes."""
    identity = model.identity
    plain = {key: value for key, value in asdict(identity).items() if key not in ("name", "weights_sample")}
    sample = [[name, list(values)] for name, values in sorted(identity.weights_sample.items())]
    return {**plain, "weights_sample": sample, "device": model.device}


def _records(part: str) -> str:
    return f"dataset/{part}.jsonl"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]
