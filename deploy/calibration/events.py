"""What a worker tells of its work while it does it, and how the driver shows that."""

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
"""Updates of a stage are sent together, at most so often."""


@dataclass(frozen=True, slots=True)
class Began:
    stage: str
    total: int | None
    unit: str
    done: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    num: int
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """Of a stage."""


@dataclass(frozen=True, slots=True)
class Noted:
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a piece of work."""

    result: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class Took:
    """One of several that work together is done."""

    number: int
    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The work raised this; whoever did it raises it as well."""

    error: BaseException


Event = Began | Moved | Ended | Noted | Done | Took | Failed


def events_of(work: Callable[[Progress], Any]) -> Iterator[Event]:
    """Do the work in a thread, and give what it tells as it comes. What it raises comes out here."""
    events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
    started = time.monotonic()

    def run() -> None:
        try:
            result = work(Teller(events.put))
        except BaseException as error:
            events.put(error)
        else:
            events.put(Done(result, time.monotonic() - started))

    threading.Thread(target=run, name="tide-work", daemon=True).start()
    while True:
        event = events.get()
        if isinstance(event, BaseException):
            raise event
        yield event
        if isinstance(event, Done):
            return


class Shown:
    """Shows the events of one piece of work. One that is given up leaves no open stage behind."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open = contextlib.ExitStack()
        self._stage: Stage | None = None

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def show(self, event: Event) -> None:
        if isinstance(event, Began):
            self._open.close()  # of one that was begun by somebody who died
            stage = self._progress.stage(event.stage, event.total, event.unit, event.done)
            self._stage = self._open.enter_context(stage)
        elif isinstance(event, Moved) and self._stage is not None:
            self._stage.update(event.num, **event.info)
        elif isinstance(event, Ended):
            self._open.close()
            self._stage = None
        elif isinstance(event, Noted):
            self._progress.note(event.text)


class Teller:
    """Progress as events."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        self._tell(Began(name, total, unit, done))
        stage = _TellerStage(self._tell)
        yield stage
        stage.flush()
        self._tell(Ended())

    def note(self, text: str) -> None:
        self._tell(Noted(text))


class _TellerStage:
    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._num, self._info = 0, dict[str, object]()
        self._told_at = 0.0

    def update(self, n: int = 1, **info: object) -> None:
        self._num += n
        self._info |= info
        if time.monotonic() - self._told_at >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._num or self._info:
            self._tell(Moved(self._num, self._info))
        self._num, self._info, self._told_at = 0, {}, time.monotonic()
