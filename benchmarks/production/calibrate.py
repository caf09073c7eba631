"""Part `calibrate`: exits of the model, made as `tide calibrate` makes them, with the cost of each phase.

The pipeline and its stages are those of the command, with two differences: the executor times each task, and the call
ends before its deadline. A run that ended early resumes in the next call: written shards are kept, and training
continues from its last saved state. During training the call ends after a save if there is no time for another one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Measures, commit
from benchmarks.production.session import Deadline, Phases, Session
from tide_core.calibration import stages
from tide_core.calibration.executor import IsOver, Item, LocalExecutor, Result, StageContext, Task
from tide_core.calibration.ledger import RunFiles, check_output, locked
from tide_core.calibration.pipeline import Pipeline
from tide_core.calibration.progress import LineProgress, Progress, Stage
from tide_core.calibration.train.train import SAVE_SECONDS

PHASES = {
    "make_prompts": "dataset",
    "make_shard": "collect",
    "choose_candidates": "choose",
    "train": "train",
    "trace": "risk",
    "write_artefact": "publish",
}
"""Phase by name of the task."""
MODEL, REST = "model", "host"
"""Phases that are not tasks: making the model, and the work of the pipeline between tasks."""
CALIBRATION = (MODEL, *PHASES.values(), REST)
MB = 1e6


def calibrate(session: Session) -> Measures:
    """From nothing to the published artefact, or from where the last call ended."""
    if session.state.values["calibrated"] is None or not session.artefact.is_dir():
        _run(session)
    else:
        session.log(f"calibrate: done before, {session.artefact}")
    return _measures(session)


def _run(session: Session) -> None:
    loaded, phases, run = session.loaded, session.phases, session.folder / "run"
    check_output(session.artefact, run, force=True)
    began, timed_before = time.perf_counter(), phases.seconds
    try:
        with locked(run):
            files = SavingFiles(run, session.deadline)
            context = StageContext(session.calibration, loaded.model, loaded.tokenizer, loaded.identity, files)
            executor = TimedExecutor(context, phases, session.deadline)
            pipeline = Pipeline(session.calibration, executor, files, TimedProgress(session.deadline))
            result = pipeline.run(publish_to=session.artefact, model_name=loaded.name, timer=None)
    finally:
        phases.add(REST, time.perf_counter() - began - (phases.seconds - timed_before))
    context.generator.release()
    del context, executor, pipeline
    gc.collect()
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()
    session.state.values["calibrated"] = {
        "digest": result.digest,
        "verdict": list(result.verdict),
        "bytes": folder_bytes(session.artefact),
        "commit": commit(),
        "predicted": predicted_of(session.artefact),
    }
    session.state.save()


def _measures(session: Session) -> Measures:
    found, key, state = Measures(), session.target.key, session.state.values
    phases = {name: state["phases"][name] for name in CALIBRATION if name in state["phases"]}
    seconds = {name: phase["seconds"] for name, phase in phases.items()}
    seconds[MODEL] /= phases[MODEL]["times"]  # every call makes the model; a calibration needs it once
    total, size = sum(seconds.values()), state["calibrated"]["bytes"]
    host = max(phases.values(), key=lambda phase: float(phase["host_peak_gb"]))["host_peak_gb"]
    device = {name: phase["device_peak_gb"] for name, phase in phases.items()}
    worst = max(device, key=lambda name: device[name])
    found.figures |= {
        "phases": phases,
        "seconds": total,
        "calls": phases[MODEL]["times"],
        "seconds_per_step": seconds.get("train", 0.0) / session.calibration.steps,
        **state["calibrated"],
    }
    each = ", ".join(f"{name} {mine:.0f} s" for name, mine in seconds.items())
    found.add(f"{key}_minutes", total / 60, f"{each}; {session.calibration.steps} steps")
    found.add(f"{key}_artefact", size / MB, f"{size} bytes with its report")
    found.add(f"{key}_host", host, f"device {device[worst]:.1f} GB, in {worst}")
    return found


class TimedExecutor(LocalExecutor):
    """Runs every task in this process and times it."""

    def __init__(self, context: StageContext, phases: Phases, deadline: Deadline) -> None:
        super().__init__(context)
        self._phases, self._deadline = phases, deadline

    def map_unordered(
        self, task: Task[Item, Result], items: Sequence[Item], is_over: IsOver = lambda: False
    ) -> Iterator[tuple[Item, Result]]:
        def timed(context: StageContext, item: Item, progress: Progress) -> Result:
            self._deadline.check(phase_of(task))
            with self._phases.timed(phase_of(task)):
                return task(context, item, progress)

        return super().map_unordered(timed, items, is_over)

    def train(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        with self._phases.timed(phase_of(task)):
            return super().train(task, item, progress)

    def run(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        self._deadline.check(phase_of(task))
        with self._phases.timed(phase_of(task)):
            return super().run(task, item, progress)


def phase_of(task: Any) -> str:
    name: str = task.__name__
    return PHASES.get(name, name)


class TimedProgress(LineProgress):
    """Lines on standard output. A stage ends with OutOfTime at its first update after the deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(sys.stdout)
        self._deadline = deadline

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        with super().stage(name, total, unit, done) as inner:
            deadline = self._deadline

            class TimedStage:
                def update(self, n: int = 1, **info: object) -> None:
                    inner.update(n, **info)
                    deadline.check(name)

            yield TimedStage()


class SavingFiles(RunFiles):
    """The files of a run. Raises OutOfTime after a save of the training if the next save would be past the deadline."""

    def __init__(self, folder: Path, deadline: Deadline) -> None:
        super().__init__(folder)
        self._deadline = deadline
        self._saved_at: float | None = None

    def pull(self, names: Iterable[str]) -> None:
        if stages.STATE in names:  # training begins
            self._saved_at = time.monotonic()

    def push(self, names: Iterable[str]) -> None:
        if stages.STATE not in names or not (self.folder / stages.STATE).exists():
            return
        now = time.monotonic()
        interval = SAVE_SECONDS if self._saved_at is None else now - self._saved_at
        self._saved_at = now
        self._deadline.check("training until its next save", 1.1 * interval)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def predicted_of(artefact: Path) -> dict[str, float]:
    """Speed-ups that the report of an artefact predicts, by batch size."""
    predicted: dict[str, float] = json.loads((artefact / "report.json").read_text())["predicted"]
    return predicted
