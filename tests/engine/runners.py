"""Runners around a function, for tests of what stands above them; and a gate that holds their steps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tide_core.batch import ScheduledBatch, StepResult
from tide_core.engine.engine import Engine

Run = Callable[[ScheduledBatch], StepResult]

HANG_S = 60.0
"""Longest wait for an event that a test causes itself: it bounds a hang and decides nothing else."""


@dataclass
class RunnerOf:
    """A runner whose steps run when they are waited for."""

    run: Run

    def start(self, batch: ScheduledBatch) -> StepOf:
        return StepOf(self.run, batch)

    def lookahead_steps(self) -> int:
        return 0


@dataclass
class StepOf:
    run: Run
    batch: ScheduledBatch

    def wait(self) -> StepResult:
        return self.run(self.batch)


class HeldTooLongError(BaseException):
    """Nobody opened the gate. It ends the engine's loop, so that no test hangs."""


class Gate:
    """Holds the steps of an engine, so that its requests stay open until a test has done what it needs them for.

    So many steps run; each one after them waits until it is let through. The outputs of a step are delivered when the
    next one begins: with one step let through, a stream gets its first token and the request stays open. Enter it after
    the engine, so that it opens before the engine closes."""

    def __init__(self, num_steps: int = 0) -> None:
        self._changed = threading.Condition()
        self._num_left: float = num_steps

    def __call__(self, run: Run, is_awaited: Callable[[], bool] = lambda: False) -> Run:
        """A step is also let through when somebody waits for its end, which is asked for time and again."""

        def held(batch: ScheduledBatch) -> StepResult:
            end = time.monotonic() + HANG_S
            with self._changed:
                while not (self._num_left > 0 or is_awaited()):
                    self._changed.wait(0.005)
                    if time.monotonic() > end:
                        raise HeldTooLongError(f"a step was held for {HANG_S} s")
                self._num_left = max(0, self._num_left - 1)
            return run(batch)

        return held

    def hold(self, engine: Engine) -> Gate:
        """Hold the steps of an engine that has no work yet. Whoever waits for its step lock gets the lock after one
        step."""
        lock = engine._loop.step_lock
        run = self(engine._parts.runner.run, is_awaited=lambda: lock._asked - lock._served > 1)
        engine._parts.core._runner = RunnerOf(run)
        return self

    def let(self, num_steps: float) -> None:
        with self._changed:
            self._num_left += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        self.let(math.inf)

    def close_engine(self, engine: Engine) -> None:
        """Close an engine while its step is held; the step is let through when the engine is stopping."""
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine._loop._stopping:
            time.sleep(0.001)
        self.open()
        closing.join()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.open()
