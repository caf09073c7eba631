"""Gates in a job: a process that comes to a closed gate waits there until the test opens it or kills the process.

    python -m tests.job.gates --config FILE    the job, with gates in its workers

A job that waits at a gate cannot end, however slow the test is. A gate is before a piece of work and has its name
(`train`, `shards/train-00003.safetensors`), or after a file that a piece of work saves on its way and has the name of
the file (`train/state/training.safetensors`). Workers find the gates in the folder that the variable GATES names.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATES = "TIDE_TEST_GATES"
STOP = "stop"
POLL_S = 0.02
SAVE_EVERY = 20
"""Steps between two states of a training: a short training saves one on its way."""


class Gate:
    """One gate of one run, as the test sees it: closed from the start. One that `stops` opens when the first process
    comes to it, and that process gets a SIGSTOP."""

    def __init__(self, folder: Path, run: str, name: str, *, stops: bool = False) -> None:
        self._path = _path(folder, run, name)
        self._path.mkdir(parents=True)
        if stops:
            (self._path / STOP).touch()

    @property
    def waiting(self) -> list[int]:
        """Ids of the processes that came to it."""
        found = self._path if self._path.exists() else _opened(self._path)
        return [int(entry.name) for entry in found.iterdir() if entry.name != STOP]

    def open(self) -> None:
        self._path.rename(_opened(self._path))


def saved(folder: Path, run: str) -> list[str]:
    """Names of the files that workers saved in a run, in order. A file that was saved twice is there twice."""
    path = folder / run / "saved"
    return path.read_text().split() if path.exists() else []


@dataclass(frozen=True)
class GatedWork:
    """A piece of work with the gates of its run. It travels to the worker in place of the work."""

    run: str
    work: Callable[..., Any]

    def __call__(self, context: Any, item: Any, progress: Any) -> Any:
        from deploy.calibration.pool import name_of

        name = name_of(item)
        with self._gates_after_files(context.files), _saves_often():
            pass_gate(self.run, name if "/" in name else self.work.__name__)
            return self.work(context, item, progress)

    @contextlib.contextmanager
    def _gates_after_files(self, files: Any) -> Iterator[None]:
        push, notes = files.push, Path(os.environ[GATES]) / self.run / "saved"

        def push_and_wait(names: Iterable[str]) -> None:
            names = list(names)
            push(names)
            notes.parent.mkdir(parents=True, exist_ok=True)
            with notes.open("a") as stream:
                stream.writelines(f"{name}\n" for name in names)
            for name in names:
                pass_gate(self.run, name)

        files.push = push_and_wait
        yield
        files.push = push


def pass_gate(run: str, name: str) -> None:
    """Wait while the gate is closed. A gate that no test made is open."""
    path = _path(Path(os.environ[GATES]), run, name)
    with contextlib.suppress(FileNotFoundError):
        (path / str(os.getpid())).touch()
        (path / STOP).unlink()
        path.rename(_opened(path))
        os.kill(os.getpid(), signal.SIGSTOP)
    while path.exists():
        time.sleep(POLL_S)


def _path(folder: Path, run: str, name: str) -> Path:
    return folder / run / name.replace("/", ":")


def _opened(path: Path) -> Path:
    return path.with_name(f"opened {path.name}")


@contextlib.contextmanager
def _saves_often() -> Iterator[None]:
    from tide_core.calibration.train import train

    plain = train.SAVE_EVERY, train.SAVE_SHARE
    train.SAVE_EVERY, train.SAVE_SHARE = SAVE_EVERY, math.inf
    yield
    train.SAVE_EVERY, train.SAVE_SHARE = plain


def put_in() -> None:
    """In the driver: all tasks of its executor get gates."""
    from deploy.calibration.executor import RayExecutor

    def gated(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, work: Any, *rest: Any) -> Any:
            return method(self, work if isinstance(work, GatedWork) else GatedWork(self._settings.name, work), *rest)

        return call

    for name in ("map_unordered", "run", "train"):
        setattr(RayExecutor, name, gated(getattr(RayExecutor, name)))


if __name__ == "__main__":
    import typer

    from deploy import calibrate
    from tests.job import gates  # under its own name: workers import what they get from there

    gates.put_in()
    typer.run(calibrate.main)
