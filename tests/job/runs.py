"""Runs of the job: their settings, their files, and copies of them that are not so far yet."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import yaml

from tests.calibration.tiny_runs import tiny_calibration
from tests.evaluation.on_disk import save_model
from tests.job.cluster import Cluster, Driver, Ended
from tests.job.gates import Gate
from tide_core.calibration.ledger import STAGES, read_ledger
from tide_core.exits.artefact.artefact import Artefact, Manifest, load_artefact

CALIBRATION: dict[str, Any] = {
    "num_samples": 420,
    "generation_batch": 42,
    "max_new_tokens": 16,
    "self_prompt_tokens": 16,
    "steps": 40,
    "measure_batches": (1,),
    "fast_answers": 4,  # nothing is certified on so few: a digest does not depend on measuring
    "fast_tokens": 4,
    "min_test": 64,
    "min_calibration": 128,
}
"""More samples than there are shipped prompts, so that some are the model's own; a dozen shards; a short training."""
STATE = "train/state/training.safetensors"
MAX_THRESHOLD_ERROR = 0.1
FILES = {"dataset": ("dataset", "prompts"), "collect": ("shards",), "train": ("train",), "risk": ("risk",)}


@dataclass(frozen=True)
class Job:
    """A config in a file, and where its run and its artefact will be."""

    config: Path
    settings: dict[str, Any]

    @property
    def run(self) -> Path:
        return Path(self.settings["storage"]) / str(self.settings["name"])

    @property
    def output(self) -> Path:
        return Path(self.settings["output"])

    @property
    def ledger(self) -> dict[str, Any]:
        return read_ledger(self.run) or {"shards": {}, "stages": {}}

    @property
    def artefact(self) -> Artefact:
        """As published; it is checked from the first byte to the last."""
        return load_artefact(self.output, None)

    def shards(self, folder: str) -> list[str]:
        """Those that the ledger has."""
        return [name for name in self.ledger["shards"] if name.startswith(f"{folder}/")]

    def contents(self, folder: str) -> dict[str, bytes]:
        """What is there under final names."""
        found = sorted((self.run / folder).glob("[!.]*")) if (self.run / folder).exists() else []
        return {f"{folder}/{path.name}": path.read_bytes() for path in found}

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Which file each shard of the ledger is, and of when."""
        statuses = {name: (self.run / name).stat() for name in self.ledger["shards"]}
        return {name: (status.st_ino, status.st_mtime_ns) for name, status in statuses.items()}

    @property
    def has_state(self) -> bool:
        """Whether a saved state of a training is there."""
        return (self.run / STATE).exists()


@dataclass
class Bench:
    """Makes jobs for one tiny model and does them on one cluster."""

    cluster: Cluster
    root: Path
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._model = save_model(self.root / "model")

    def job(self, calibration: dict[str, Any] | None = None, **settings: Any) -> Job:
        values = tiny_calibration(**{**CALIBRATION, **(calibration or {})}).to_mapping()
        return self._job({"calibration": values, **settings})

    def again(self, job: Job, *, since: str, **settings: Any) -> Job:
        """A job with the run of another one, as it was before a stage."""
        kept = {key: value for key, value in job.settings.items() if key not in ("name", "storage", "output")}
        copy = self._job({**kept, **settings})
        shutil.copytree(job.run, copy.run)
        state = copy.ledger
        for stage in STAGES[STAGES.index(since) :]:
            state["stages"].pop(stage, None)
            for folder in FILES.get(stage, ()):
                shutil.rmtree(copy.run / folder)
                state["shards"] = {k: v for k, v in state["shards"].items() if not k.startswith(f"{folder}/")}
        shutil.rmtree(copy.run / "artefact")
        state["published"] = None
        (copy.run / "ledger.msgpack").write_bytes(msgpack.packb(state))
        return copy

    def _job(self, settings: dict[str, Any]) -> Job:
        name = f"run-{next(self._numbers)}"
        usual = {
            "name": name,
            "storage": str(self.root / "runs"),
            "output": str(self.root / "out" / name),
            "model": str(self._model),
            "dtype": "float32",
            "device": "cpu",
            "measure": False,
            "workers": {"count": 1},
        }
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**usual, **settings}))
        return Job(path, {**usual, **settings})

    def start(self, job: Job, *, gates: bool = False) -> Driver:
        return self.cluster.calibrate(job.config, gates=gates)

    def gate(self, job: Job, name: str, *, stops: bool = False) -> Gate:
        return self.cluster.gate(str(job.settings["name"]), name, stops=stops)

    def num_states(self, job: Job) -> int:
        """How many states its trainings have saved, where they had gates."""
        return self.cluster.saved(str(job.settings["name"])).count(STATE)

    def run(self, job: Job) -> Ended:
        return self.start(job).end()

    def done(self, job: Job) -> Ended:
        """As `run`, of a job that goes well."""
        ended = self.run(job)
        assert ended.code == 0, ended.err
        return ended


def pieces(err: str) -> Counter[str]:
    """How often each piece of work was finished, by what the driver says."""
    return Counter(re.findall(r"^tide: (\S+/\S+) by worker \d+", err, re.M))


def check_agree(one: Manifest, other: Manifest) -> None:
    """They differ by no more than chance: a risk is a mean over sequences, and has an error of its own."""
    [this], [that] = one.checkpoints, other.checkpoints
    assert (this.layer, this.head) == (that.layer, that.head)
    assert abs(this.draft_threshold - that.draft_threshold) <= MAX_THRESHOLD_ERROR
    assert (this.fast is None) == (that.fast is None)
    for mine, yours in zip(this.acceptance, that.acceptance, strict=True):
        assert abs(mine - yours) <= 0.1
