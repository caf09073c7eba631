"""The ledger of a run: what was asked for, and the digest of everything that is already on disk. No torch here.

    <run>/ledger.msgpack     settings, model, shards, finished stages, who did how much
    <run>/.lock              held by the process that works on the run

A rerun checks the files of every finished stage against the ledger and skips it. Where a file is missing or has
changed, that stage and all later ones are done again. Other settings, another model or other data under the same
run are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tide_core.calibration.collect.shard_entry import ShardEntry
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.files import RunFiles
from tide_core.calibration.worker_time import WorkerTime
from tide_core.disk import write_whole
from tide_core.errors import ConfigError

FORMAT_VERSION = 3
LEDGER = "ledger.msgpack"
STAGES = ("dataset", "collect", "train", "risk", "publish", "measure")
MAX_SHOWN_CHANGES = 6


class Ledger:
    """One run on disk. Every change is written at once."""

    def __init__(
        self, files: RunFiles, config: CalibrationConfig, model: Mapping[str, Any], data: Mapping[str, Any]
    ) -> None:
        self._files = files
        asked = {"config": config.to_mapping(), "model": dict(model), "data": dict(data)}
        files.bring([LEDGER])
        found = read_ledger(files.folder)
        if found is None:
            nothing: dict[str, Any] = {"shards": {}, "stages": {}, "workers": [], "published": None}
            found = {"format_version": FORMAT_VERSION, **asked, **nothing}
        else:
            _check_same(files.folder, found, asked)
        self._state = found
        self._write()

    @property
    def data(self) -> dict[str, str]:
        """What the run was started with: files and their SHA-256."""
        return dict(self._state["data"])

    @property
    def shards(self) -> dict[str, ShardEntry]:
        """By their name in the run."""
        return {name: ShardEntry(name, *values) for name, values in self._state["shards"].items()}

    @property
    def workers(self) -> list[WorkerTime]:
        """Who did how much, over all who have driven the run."""
        return [WorkerTime(*values) for values in self._state["workers"]]

    def add_shard(self, entry: ShardEntry, workers: Sequence[WorkerTime]) -> None:
        self._state["shards"][entry.name] = [entry.sha256, entry.num_sequences, entry.num_tokens]
        self._state["workers"] = [astuple(worker) for worker in workers]
        self._write()

    def drop_shard(self, name: str) -> None:
        self._state["shards"].pop(name, None)
        self._write()

    def finish(
        self, stage: str, outputs: Mapping[str, str], info: Mapping[str, Any], workers: Sequence[WorkerTime]
    ) -> None:
        """Note a stage as done, with the SHA-256 of its files by their path in the run."""
        self._state["stages"][stage] = {"outputs": dict(outputs), "info": dict(info)}
        self._state["workers"] = [astuple(worker) for worker in workers]
        self._write()

    def reopen(self, stage: str) -> None:
        """Forget a stage and all that follow from it."""
        for later in STAGES[STAGES.index(stage) :]:
            self._state["stages"].pop(later, None)
        self._write()

    def info(self, stage: str) -> dict[str, Any] | None:
        """What was noted of a finished stage; None for one that is not."""
        record = self._state["stages"].get(stage)
        return None if record is None else record["info"]

    def fault(self, stage: str) -> str | None:
        """Which file of a finished stage is not as it was left."""
        outputs = self._state["stages"][stage]["outputs"]
        self._files.bring(outputs)
        for name, digest in outputs.items():
            if digest_of(self._files.folder / name) != digest:
                return str(name)
        return None

    def note_publishing(self, target: Path) -> None:
        """From here on, whatever lies at `target` may be from this run."""
        self._state["published"] = str(target)
        self._write()

    def _write(self) -> None:
        import msgpack

        write_whole(self._files.folder / LEDGER, msgpack.packb(self._state))
        self._files.keep([LEDGER])


def read_ledger(run_dir: Path) -> dict[str, Any] | None:
    """The ledger of a run as it is on disk; None where there is none yet."""
    import msgpack

    path = run_dir / LEDGER
    if not path.exists():
        return None
    expected = "a whole ledger; remove the run directory to start again"
    try:
        state = msgpack.unpackb(path.read_bytes())
    except (OSError, ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"ledger {path}", f"{type(error).__name__}: {error}", expected) from error
    keys = {"format_version", "config", "model", "data", "shards", "stages", "workers", "published"}
    if not isinstance(state, dict) or state.keys() != keys or state["format_version"] != FORMAT_VERSION:
        raise ConfigError(f"ledger {path}", "another format", f"format version {FORMAT_VERSION}")
    return state


def check_output(publish_to: Path, run_dir: Path, *, force: bool) -> None:
    """Refuse a taken output before any work, unless it may be replaced or this very run has put it there."""
    if not os.path.lexists(publish_to) or force or (publish_to.is_dir() and not any(publish_to.iterdir())):
        return
    state = read_ledger(run_dir)
    if state is None or state["published"] != str(publish_to.absolute()):
        raise ConfigError("output", publish_to, "a name that is free; --force replaces what is there")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One process at a time. The kernel lets go of the lock when its holder dies."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError("run directory", run_dir, f"a folder that can be written: {error.strerror}") from error
    with contextlib.closing(os.fdopen(descriptor)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("run directory", run_dir, "one that no other process works on now") from None
        yield


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file; None where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _check_same(run_dir: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    changes = []
    for part in ("config", "model", "data"):
        for key in sorted(found[part].keys() | asked[part].keys()):
            before, now = found[part].get(key), asked[part].get(key)
            if before != now:
                changes.append(f"{key} was {_shown(before)} and is {_shown(now)}")
    if changes:
        named = "; ".join(changes[:MAX_SHOWN_CHANGES])
        expected = f"the settings, the model and the data it was started with, or another run directory: {named}"
        raise ConfigError(f"run {run_dir}", f"{len(changes)} changes", expected)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
