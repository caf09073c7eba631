"""Events of a running task: a worker sends them, the driver shows them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tide_core.calibration.progress import Progress, Stage

EVERY_S = 0.5
"""Minimum time between two updates of a stage; those in between are merged."""


@dataclass(frozen=True, slots=True)
class StageStarted:
    stage: str
    total: int | None
    unit: str
    done: int = 0


@dataclass(frozen=True, slots=True)
class StageUpdated:
    num: int
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageEnded:
    pass


@dataclass(frozen=True, slots=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True)
class TaskDone:
    """The last event of a task."""

    result: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainerDone:
    """One of several processes that train together has ended."""

    number: int
    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task raised this error, and so does the process that ran it."""

    error: BaseException


Event = StageStarted | StageUpdated | StageEnded | Note | TaskDone | TrainerDone | TaskFailed


def run_with_events(task: Callable[[Progress], Any]) -> Iterator[Event]:
    """Run a task in a thread and yield its events as they occur. An error of the task is raised here."""
    events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
    started = time.monotonic()

    def run() -> None:
        try:
            result = task(EventProgress(events.put))
        except BaseException as error:
            events.put(error)
        else:
            events.put(TaskDone(result, time.monotonic() - started))

    threading.Thread(target=run, name="tide-work", daemon=True).start()
    while True:
        event = events.get()
        if isinstance(event, BaseException):
            raise event
        yield event
        if isinstance(event, TaskDone):
            return


class EventDisplay:
    """Shows the events of one task; on exit it closes a stage that is still open."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open = contextlib.ExitStack()
        self._stage: Stage | None = None

    def __enter__(self) -> EventDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def show(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            self._open.close()  # a stage of a worker that died
            stage = self._progress.stage(event.stage, event.total, event.unit, event.done)
            self._stage = self._open.enter_context(stage)
        elif isinstance(event, StageUpdated) and self._stage is not None:
            self._stage.update(event.num, **event.info)
        elif isinstance(event, StageEnded):
            self._open.close()
            self._stage = None
        elif isinstance(event, Note):
            self._progress.note(event.text)


class EventProgress:
    """A `Progress` that sends events."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        self._send(StageStarted(name, total, unit, done))
        stage = _EventStage(self._send)
        yield stage
        stage.flush()
        self._send(StageEnded())

    def note(self, text: str) -> None:
        self._send(Note(text))


class _EventStage:
    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._num, self._info = 0, dict[str, object]()
        self._sent_at = 0.0

    def update(self, n: int = 1, **info: object) -> None:
        self._num += n
        self._info |= info
        if time.monotonic() - self._sent_at >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._num or self._info:
            self._send(StageUpdated(self._num, self._info))
        self._num, self._info, self._sent_at = 0, {}, time.monotonic()
