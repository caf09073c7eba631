"""A run on disk: its files, and the ledger with the settings and the digest of everything that is done. No torch here.

    <run>/ledger.msgpack     settings, model, shards, finished stages, work of each worker
    <run>/.lock              held by the process that works on the run

A rerun checks the files of every finished stage against the ledger and skips the stage. Where a file is missing or has
changed, that stage and all later ones run again. A run refuses other settings, another model or other data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from tide_core.calibration.config import CalibrationConfig
from tide_core.disk import write_whole
from tide_core.errors import ConfigError


class RunFiles:
    """The files of a run in a folder that all its processes share, so that `pull` and `push` have nothing to do.

    A run in an object store has a local folder on every machine; a subclass copies files between the two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pull(self, names: Iterable[str]) -> None:
        """Bring these files of the folder up to date; one that the run does not have is removed from the folder."""

    def push(self, names: Iterable[str]) -> None:
        """Make these files of the folder, or their absence, visible to all processes."""

    def push_together(self, names: Sequence[str]) -> None:
        """Like `push`, for files that form one thing: the last one is removed before any other changes and is written
        after all others, so that a reader who finds it finds all of them."""

    def path(self, name: str) -> Path:
        """Path of a file of the run; its folder exists afterwards."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The ledger's record of a shard or of a file of prompts."""

    name: str
    """Its path in the run."""
    sha256: str
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """The work of one of several workers."""

    name: str
    node: str
    num_items: int
    """Shards, prompts and stages."""
    busy_s: float
    num_restarts: int


def add_worker_times(before: Sequence[WorkerTime], now: Sequence[WorkerTime]) -> list[WorkerTime]:
    """The sums of two drivers of one run; workers of one name on one node count as one."""
    added = {(each.name, each.node): each for each in before if each.num_items or each.num_restarts}
    for each in now:
        old = added.get((each.name, each.node), WorkerTime(each.name, each.node, 0, 0.0, 0))
        added[each.name, each.node] = replace(
            each,
            num_items=old.num_items + each.num_items,
            busy_s=old.busy_s + each.busy_s,
            num_restarts=old.num_restarts + each.num_restarts,
        )
    return list(added.values())


FORMAT_VERSION = 3
LEDGER = "ledger.msgpack"
STAGES = ("dataset", "collect", "train", "risk", "fast", "publish", "measure")
MAX_SHOWN_CHANGES = 6


class Ledger:
    """The ledger of one run. Every change is written at once."""

    def __init__(
        self, files: RunFiles, config: CalibrationConfig, model: Mapping[str, Any], data: Mapping[str, Any]
    ) -> None:
        self._files = files
        settings = {"config": config.to_mapping(), "model": dict(model), "data": dict(data)}
        files.pull([LEDGER])
        state = read_ledger(files.folder)
        if state is None:
            empty: dict[str, Any] = {"shards": {}, "stages": {}, "workers": [], "published": None}
            state = {"format_version": FORMAT_VERSION, **settings, **empty}
        else:
            _check_same(files.folder, state, settings)
        self._state = state
        self._write()

    @property
    def data(self) -> dict[str, str]:
        """The data files that the run started with, and their SHA-256."""
        return dict(self._state["data"])

    @property
    def shards(self) -> dict[str, ShardEntry]:
        """By their name in the run."""
        return {name: ShardEntry(name, *values) for name, values in self._state["shards"].items()}

    @property
    def workers(self) -> list[WorkerTime]:
        """The work of each worker, over all drivers of the run so far."""
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
        """Record a stage as done, with the SHA-256 of its files by their path in the run."""
        self._state["stages"][stage] = {"outputs": dict(outputs), "info": dict(info)}
        self._state["workers"] = [astuple(worker) for worker in workers]
        self._write()

    def reopen(self, stage: str) -> None:
        """Remove a stage and all later ones."""
        for later in STAGES[STAGES.index(stage) :]:
            self._state["stages"].pop(later, None)
        self._write()

    def info(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage recorded; None for a stage that is not finished."""
        record = self._state["stages"].get(stage)
        return None if record is None else record["info"]

    def changed_file(self, stage: str) -> str | None:
        """The first file of a finished stage that is missing or has changed."""
        outputs = self._state["stages"][stage]["outputs"]
        self._files.pull(outputs)
        for name, digest in outputs.items():
            if digest_of(self._files.folder / name) != digest:
                return str(name)
        return None

    def record_publishing(self, target: Path) -> None:
        """From here on, an artefact at `target` may be of this run."""
        self._state["published"] = str(target)
        self._write()

    def _write(self) -> None:
        import msgpack

        write_whole(self._files.folder / LEDGER, msgpack.packb(self._state))
        self._files.push([LEDGER])


def read_ledger(run_dir: Path) -> dict[str, Any] | None:
    """The ledger of a run as it is on disk; None if there is none yet."""
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
    """Refuse an existing output before any work, unless `force` allows it or this run has published it."""
    if not os.path.lexists(publish_to) or force or (publish_to.is_dir() and not any(publish_to.iterdir())):
        return
    state = read_ledger(run_dir)
    if state is None or state["published"] != str(publish_to.absolute()):
        raise ConfigError("output", publish_to, "a name that is free; --force replaces what is there")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Let one process at a time work on a run. The kernel releases the lock when its holder dies."""
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
    """SHA-256 of a file; None if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _check_same(run_dir: Path, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    changes = []
    for part in ("config", "model", "data"):
        for key in sorted(state[part].keys() | settings[part].keys()):
            before, now = state[part].get(key), settings[part].get(key)
            if before != now:
                changes.append(f"{key} was {_shown(before)} and is {_shown(now)}")
    if changes:
        named = "; ".join(changes[:MAX_SHOWN_CHANGES])
        expected = f"the settings, the model and the data it was started with, or another run directory: {named}"
        raise ConfigError(f"run {run_dir}", f"{len(changes)} changes", expected)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
