"""Runners around a function, for tests of what stands above them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tide_core.batch import ScheduledBatch, StepResult

Run = Callable[[ScheduledBatch], StepResult]


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
