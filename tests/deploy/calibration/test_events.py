"""Events of a worker are shown like local progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.calibration import events
from deploy.calibration.events import EventDisplay, StageEnded, StageStarted, StageUpdated, TaskDone, run_with_events
from tide_core.calibration.progress import Progress


class ProgressLog:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Any]:
        log = self.lines
        log.append(f"begin {name} {total} {unit}" + (f", {done} done" if done else ""))

        class Stage:
            def update(self, n: int = 1, **info: object) -> None:
                log.append(f"update {n} {info}")

        yield Stage()
        log.append(f"end {name}")

    def note(self, text: str) -> None:
        self.lines.append(f"note {text}")


def work(progress: Progress) -> str:
    progress.note("ready")
    for name in ("one", "two"):
        with progress.stage(name, 3, "thing") as stage:
            stage.update(1, loss=0.5)
            stage.update(2, loss=0.25)
    return "result"


def shown(received: Any) -> tuple[list[str], list[Any]]:
    log, results = ProgressLog(), []
    with EventDisplay(log) as show:
        for event in received:
            show.show(event)
            if isinstance(event, TaskDone):
                results.append(event.result)
    return log.lines, results


def test_a_stage_there_is_a_stage_here_and_the_result_is_the_last_word() -> None:
    lines, results = shown(run_with_events(work))
    assert results == ["result"]
    assert lines[0] == "note ready"
    for name in ("one", "two"):
        begin, end = lines.index(f"begin {name} 3 thing"), lines.index(f"end {name}")
        updates = lines[begin + 1 : end]
        assert sum(int(line.split()[1]) for line in updates) == 3
        assert "0.25" in updates[-1]


def test_units_done_before_a_stage_are_shown_with_it() -> None:
    def resumed(progress: Progress) -> None:
        with progress.stage("train", 9, "step", 5) as stage:
            stage.update(4)

    assert shown(run_with_events(resumed))[0] == ["begin train 9 step, 5 done", "update 4 {}", "end train"]


def test_fast_updates_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fast(progress: Progress) -> None:
        with progress.stage("fast", 1000, "step") as stage:
            for _ in range(1000):
                stage.update(1)

    lines, _ = shown(run_with_events(fast))
    updates = [line for line in lines if line.startswith("update")]
    assert sum(int(line.split()[1]) for line in updates) == 1000
    assert len(updates) < 50
    monkeypatch.setattr(events, "EVERY_S", 0.0)
    assert len([line for line in shown(run_with_events(fast))[0] if line.startswith("update")]) == 1000


def test_what_the_work_raises_comes_out() -> None:
    def fails(progress: Progress) -> None:
        progress.note("before")
        raise ValueError("bad")

    received = run_with_events(fails)
    assert isinstance(next(received), events.Note)
    with pytest.raises(ValueError, match="bad"):
        next(received)


def test_a_task_that_exits_does_not_block_the_reader() -> None:
    """Not every end is an Exception."""

    def exits(progress: Progress) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        list(run_with_events(exits))


def test_the_result_comes_with_the_time_that_the_work_took() -> None:
    [done] = run_with_events(lambda progress: time.sleep(0.05))
    assert isinstance(done, TaskDone)
    assert 0.05 <= done.seconds < 600


def test_an_update_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.0)

    def tells(progress: Progress) -> None:
        with progress.stage("one", 3, "thing") as stage:
            stage.update(1, loss=0.5)
            stage.update(2)

    assert shown(run_with_events(tells))[0] == ["begin one 3 thing", "update 1 {'loss': 0.5}", "update 2 {}", "end one"]


def test_a_stage_that_has_ended_gets_no_updates() -> None:
    lines, _ = shown([StageStarted("train", 5, "step"), StageUpdated(1), StageEnded(), StageUpdated(2)])
    assert lines == ["begin train 5 step", "update 1 {}", "end train"]


def test_a_stage_of_a_worker_that_died_is_closed() -> None:
    lines, _ = shown([StageStarted("train", 5, "step"), StageStarted("train", 5, "step")])
    assert lines == ["begin train 5 step", "end train", "begin train 5 step", "end train"]
