"""Progress of a calibration: a bar on a terminal, a line every few seconds elsewhere, nothing in tests.

with progress.stage("train", total=1800, unit="step") as stage:
    stage.update(1, loss=2.1)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

LINE_EVERY_S = 5.0


class Stage(Protocol):
    """A stage that is running."""

    def update(self, n: int = 1, **info: object) -> None:
        """`n` more units are done; `info` is shown next to the count until a later update replaces it."""


class Progress(Protocol):
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> AbstractContextManager[Stage]:
        """A stage of `total` units (None: unknown), shown from entry to exit. Units that were `done` before are counted
        but do not enter the rate."""

    def note(self, text: str) -> None:
        """Show one permanent line."""


class SilentProgress:
    """Shows nothing."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        yield _SilentStage()

    def note(self, text: str) -> None:
        pass


class LineProgress:
    """Plain lines: one every few seconds during a stage, and its last state."""

    def __init__(self, stream: TextIO | None = None, *, every_s: float = LINE_EVERY_S) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._every_s = every_s

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        stage = _LineStage(self.note, name, total, unit, done, self._every_s)
        yield stage
        stage.end()

    def note(self, text: str) -> None:
        print(f"tide: {text}", file=self._stream, flush=True)


class BarProgress:
    """tqdm bars; a finished bar stays as a line."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        from tqdm import tqdm

        desc, unit = f"tide: {name}", f" {unit}"
        with tqdm(total=total, initial=done, desc=desc, unit=unit, file=sys.stderr, dynamic_ncols=True) as bar:

            class BarStage:
                def update(self, n: int = 1, **info: object) -> None:
                    if info:
                        bar.set_postfix({key: _shown(value) for key, value in info.items()}, refresh=False)
                    bar.update(n)

            yield BarStage()

    def note(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(f"tide: {text}", file=sys.stderr)


def default_progress(*, quiet: bool = False) -> Progress:
    """Bars if standard error is a terminal, lines if not."""
    if quiet or sys.stderr is None:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class _SilentStage:
    def update(self, n: int = 1, **info: object) -> None:
        pass


class _LineStage:
    def __init__(
        self, write: Callable[[str], None], name: str, total: int | None, unit: str, done: int, every_s: float
    ) -> None:
        self._write, self._name, self._total, self._unit, self._every_s = write, name, total, unit, every_s
        self._done = self._before = done
        self._info: dict[str, object] = {}
        self._started_at = self._shown_at = time.monotonic()
        self._is_shown = False

    def update(self, n: int = 1, **info: object) -> None:
        self._done += n
        self._info.update(info)
        self._is_shown = False
        if time.monotonic() - self._shown_at >= self._every_s:
            self.show()

    def end(self) -> None:
        if not self._is_shown:
            self.show()

    def show(self) -> None:
        self._shown_at, self._is_shown = time.monotonic(), True
        of = "" if self._total is None else f"/{self._total}"
        info = "".join(f", {key} {_shown(value)}" for key, value in self._info.items())
        self._write(f"{self._name}: {self._done}{of} {self._unit}, {self._times()}{info}")

    def _times(self) -> str:
        """Elapsed time, rate and estimated time left."""
        seconds = self._shown_at - self._started_at
        if self._total is None or not self._before < self._done < self._total or seconds < 1:
            return f"{seconds:.0f} s"
        rate = (self._done - self._before) / seconds
        return f"{seconds:.0f} s, {rate:.3g}/s, {_duration((self._total - self._done) / rate)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
