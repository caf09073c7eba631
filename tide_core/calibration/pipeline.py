"""A calibration from nothing to a published artefact: dataset → collect → train → risk → publish → measure.

    <run>/ledger.msgpack         what was asked for, and the digest of everything that is done
    <run>/dataset/<part>.jsonl   records of each part
    <run>/shortlist.safetensors  ids that an exit head can say
    <run>/...                    see work.py

Here is what needs no model: the order of things, the ledger, the plan. A crew does the rest. Every stage reads what the
ones before have left on disk, so a run that was killed goes on where it was: finished stages are checked against the
ledger and skipped. A rerun that was not interrupted ends in the same bytes, but for what the clock said: the last stage
times the published exits and puts that into the report, which is no part of the digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from tide_core.calibration import work
from tide_core.calibration.collect.collect import Unit, plan
from tide_core.calibration.collect.shards import PARTS, ShardEntry, TokenShards, remove_others
from tide_core.calibration.config import SELF_DATA, CalibrationConfig
from tide_core.calibration.crew import Crew, ModelFacts, Solo, Workshop
from tide_core.calibration.data.dataset import RecordPool, gather, kind_of, source_of, split
from tide_core.calibration.data.self_prompts import MadeUp, PromptBatch, add_self_prompts
from tide_core.calibration.files import RunFiles
from tide_core.calibration.ledger import Ledger, check_output, digest_of, locked
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.report.publish import Published, publish_measured
from tide_core.calibration.report.timing import Timer, as_info, of_info
from tide_core.calibration.train.shortlist import choose_shortlist, count_emitted, coverage_of
from tide_core.calibration.worker_time import WorkerTime, together
from tide_core.disk import write_whole
from tide_core.errors import ConfigError, one_line
from tide_core.exits.artefact.artefact import install_artefact
from tide_core.identity import ModelIdentity


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Where the artefact is and what to expect of it."""

    artefact: Path
    report: Path
    verdict: tuple[str, ...]
    digest: str
    workers: tuple[WorkerTime, ...] = ()
    """Where several did the work, whoever drove them."""


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
        files = RunFiles(run_dir)
        crew = Solo(Workshop(config, model, tokenizer, identity, files))
        return run(
            config,
            crew,
            files,
            publish_to=publish_to,
            model_name=model_name or identity.name,
            progress=progress or SilentProgress(),
            timer=timer,
        )


def run(
    config: CalibrationConfig,
    crew: Crew,
    files: RunFiles,
    *,
    publish_to: Path,
    model_name: str,
    progress: Progress,
    timer: Timer | None,
) -> CalibrationResult:
    """Calibrate the crew's model. The caller sees to it that nobody else works on the run."""
    return _Run(config, crew, files, progress).to(publish_to.absolute(), model_name, timer)


class _Run:
    def __init__(self, config: CalibrationConfig, crew: Crew, files: RunFiles, progress: Progress) -> None:
        self._config, self._crew, self._files, self._progress = config, crew, files, progress
        self._facts = crew.facts
        self._ledger = Ledger(files, config, _asked_of(self._facts), source_of(config))
        self._before = self._ledger.workers

    def to(self, publish_to: Path, model_name: str, timer: Timer | None) -> CalibrationResult:
        self._stage("dataset", self._make_dataset)
        self._stage("collect", self._collect)
        self._stage("train", self._train)
        self._remove(work.STATES)  # not before the ledger knows what came of them
        self._stage("risk", self._trace)
        published = self._publish(publish_to, model_name)
        published, failure = self._time(published, publish_to, timer)
        verdict = (*published.data.verdict, *failure)
        workers = tuple(self._workers())
        return CalibrationResult(publish_to, publish_to / published.report, verdict, published.digest, workers)

    def _stage(self, name: str, do: Callable[[], tuple[Sequence[str], dict[str, Any]]]) -> None:
        """Do a stage unless it is done and its files are as it left them."""
        if self._ledger.info(name) is not None:
            fault = self._ledger.fault(name)
            if fault is None:
                self._progress.note(f"{name}: done before")
                return
            self._progress.note(f"{name}: {fault} is not as it was left; the stage is done again")
            self._ledger.reopen(name)
        outputs, info = do()
        self._files.bring(outputs)
        shards = self._ledger.shards  # those as they were written: what has changed since is found the next time
        digests = {
            path: shards[path].sha256 if path in shards else digest_of(self._files.folder / path) or ""
            for path in outputs
        }
        self._ledger.finish(name, digests, info, self._workers())

    def _make_dataset(self) -> tuple[list[str], dict[str, Any]]:
        pool = gather(self._config)
        if source_of(self._config) != self._ledger.data:
            raise ConfigError("data", self._config.data, "files that do not change while they are read")
        given: list[str] = []
        if self._config.data == SELF_DATA:
            given = pool.lines()
            batch = self._facts.generation_batch
            add_self_prompts(pool, self._config, self._made_up, batch, self._progress)
        parts = split(pool.lines(), self._config, given)
        for name in self._ledger.shards:  # of other records
            if not name.startswith("prompts/"):
                self._ledger.drop_shard(name)
        outputs = []
        for part, lines in parts.items():
            outputs.append(_records(part))
            write_whole(self._files.path(outputs[-1]), "".join(f"{line}\n" for line in lines).encode())
        self._files.keep(outputs)
        sizes = ", ".join(f"{len(lines)} {part}" for part, lines in parts.items() if lines)
        self._progress.note(f"dataset: {sizes}{''.join(self._remarks(pool))}")
        counts = {"num_bad": pool.num_bad, "num_seen": pool.num_seen, "num_near": pool.num_near}
        return outputs, {"kind": kind_of(self._config.data), **counts}

    def _made_up(self, batches: Sequence[PromptBatch]) -> Iterator[list[MadeUp]]:
        """The prompts of every batch, in order, however they come in."""
        done = self._whole([batch.name for batch in batches])
        for _, entry in self._crew.each(work.make_prompts, [batch for batch in batches if batch.name not in done]):
            self._ledger.add_shard(entry, self._workers())
            done[entry.name] = entry
        self._files.bring(done)
        for batch in batches:
            yield work.read_prompts((self._files.folder / batch.name).read_bytes())

    def _remarks(self, pool: RecordPool) -> Iterator[str]:
        """What was not taken."""
        if pool.num_bad:
            yield f"; {pool.num_bad} of {pool.num_seen} could not be used"
        if pool.num_near:
            yield f"; {pool.num_near} prompts of the model's dropped, each nearly another one"
        if self._config.data == SELF_DATA and len(pool) < self._config.num_samples:
            yield f"; {len(pool)} in all, {self._config.num_samples} were asked for"

    def _collect(self) -> tuple[list[str], dict[str, Any]]:
        records = [_records(part) for part in PARTS]
        self._files.bring(records)
        lines = {part: _lines(self._files.folder / path) for part, path in zip(PARTS, records, strict=True)}
        units = plan(self._config, lines, self._facts.generation_batch)
        paths = [unit.path for unit in units]
        remove_others(self._files.folder / work.SHARDS, {Path(path).name for path in paths})
        self._remove([work.CANDIDATES, *work.STATES])  # of other sequences
        self._make_shards(units)
        parts = {part: self._part(part) for part in ("train", "test")}
        counts = {part: count_emitted(shards, self._facts.vocab_size) for part, shards in parts.items()}
        size, coverage = self._config.shortlist_size, self._config.shortlist_coverage
        ids = choose_shortlist(counts["train"], size=size, coverage=coverage, eos_ids=self._facts.eos_ids)
        covered = coverage_of(ids, counts["test"])
        write_whole(self._files.path(work.SHORTLIST), safetensors.torch.save({"shortlist": ids}))
        self._files.keep([work.SHORTLIST])
        said = f"shortlist: {len(ids)} of {self._facts.vocab_size} tokens, {covered:.2%} of held-out ones"
        self._progress.note(said)
        return [*paths, work.SHORTLIST], {"coverage": covered}

    def _make_shards(self, units: Sequence[Unit]) -> None:
        whole = self._whole([unit.path for unit in units])
        total = sum(len(unit.records) for unit in units)
        missing = [unit for unit in units if unit.path not in whole]
        done, num_tokens = total - sum(len(unit.records) for unit in missing), 0
        with self._progress.stage("collect", total, "sequence", done) as stage:
            for unit, entry in self._crew.each(work.make_shard, missing):
                self._ledger.add_shard(entry, self._workers())
                num_tokens += entry.num_tokens
                restarts = {"restarts": self._crew.num_restarts} if self._crew.num_restarts else {}
                stage.update(len(unit.records), shard=Path(entry.name).stem, tokens=num_tokens, **restarts)

    def _whole(self, names: Sequence[str]) -> dict[str, ShardEntry]:
        """Those of the shards that the ledger has and that are on disk as they were written; others are forgotten."""
        known = {name: entry for name, entry in self._ledger.shards.items() if name in set(names)}
        self._files.bring(known)
        whole = {}
        for name, entry in known.items():
            if digest_of(self._files.folder / name) == entry.sha256:
                whole[name] = entry
            else:
                self._progress.note(f"shard {name} is not as it was left; it is made again")
                self._ledger.drop_shard(name)
        return whole

    def _train(self) -> tuple[list[str], dict[str, Any]]:
        num_sequences, num_tokens = self._crew.train(work.train, self._digests("train"), self._progress)
        return [work.CANDIDATES], {"num_sequences": num_sequences, "num_tokens": num_tokens}

    def _trace(self) -> tuple[list[str], dict[str, Any]]:
        items = [work.RiskItem(part, self._digests(part)) for part in work.HELD_OUT]
        items = [item for item in items if item.shards]
        for item in items:
            self._crew.once(work.trace, item, self._progress)
        return [item.path for item in items], {}

    def _publish(self, publish_to: Path, model_name: str) -> Published:
        dataset, collected = self._ledger.info("dataset"), self._ledger.info("collect")
        assert dataset is not None
        assert collected is not None
        item = work.PublishItem(
            shards={part: self._digests(part) for part in PARTS},
            model_name=model_name,
            data_kind=dataset["kind"],
            coverage=collected["coverage"],
            workers=self._workers(),
        )
        published = self._crew.once(work.decide_and_save, item, self._progress)
        self._files.bring(work.in_artefact(published))
        self._ledger.note_publishing(publish_to)
        install_artefact(self._files.folder / work.ARTEFACT, publish_to)
        self._ledger.finish("publish", {}, {"digest": published.digest}, self._workers())
        self._progress.note(f"publish: {publish_to} is whole ({published.digest[:16]})")
        return published

    def _time(self, published: Published, target: Path, timer: Timer | None) -> tuple[Published, tuple[str, ...]]:
        """The published exits by the clock, in the report; or why not. The artefact is whole whatever happens here."""
        if timer is None or not self._config.measure_batches:
            return published, ()
        kept = "the artefact is published, its report holds predictions only, and the same command measures again"
        try:
            measured = of_info(self._ledger.info("measure"), published.digest)
            if measured is None:
                item = work.TimeItem(timer, self._digests("test"), work.in_artefact(published))
                measured = self._crew.once(work.time_artefact, item, self._progress)
                self._ledger.finish("measure", {}, as_info(measured, published.digest), self._workers())
            else:
                self._progress.note("measure: done before")
            published = publish_measured(published, measured, self._files.folder / work.ARTEFACT)
            self._files.replace(work.in_artefact(published))
            install_artefact(self._files.folder / work.ARTEFACT, target)
            return published, ()
        except Exception as error:  # of the engine, the device, the disk: none of them is worth the calibration
            return published, (f"not measured: {one_line(error)}; {kept}",)
        except BaseException:
            self._progress.note(f"measure: interrupted; {kept}")
            raise

    def _workers(self) -> list[WorkerTime]:
        return together(self._before, self._crew.times())

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._files.path(name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                path.parent.rmdir()
        self._files.keep(names)

    def _digests(self, part: str) -> dict[str, str]:
        prefix = f"{work.SHARDS}/{part}-"
        return {name: entry.sha256 for name, entry in self._ledger.shards.items() if name.startswith(prefix)}

    def _part(self, part: str) -> TokenShards:
        shards = self._digests(part)
        self._files.bring(shards)
        return work.part_of(self._files.folder, part, shards, self._config.data)


def _asked_of(facts: ModelFacts) -> Mapping[str, Any]:
    """What must be the same when a run goes on."""
    identity = facts.identity
    plain = {key: value for key, value in asdict(identity).items() if key not in ("name", "weights_sample")}
    sample = [[name, list(values)] for name, values in sorted(identity.weights_sample.items())]
    return {**plain, "weights_sample": sample, "device": facts.device}


def _records(part: str) -> str:
    return f"dataset/{part}.jsonl"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]
