"""The executor of a job: it hands tasks to a pool of workers on a Ray cluster.

A worker that dies, or that sends no event for too long, is replaced, and its task runs again. A task depends on its
item and the run's files alone, so the result is the same. An error that a task itself raises would occur again on
another worker; it ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.calibration.events import EventDisplay, TaskDone
from deploy.calibration.pool import Pool, name_of
from deploy.calibration.settings import JobSettings
from tide_core.calibration.ledger import WorkerTime
from tide_core.calibration.progress import Progress

if TYPE_CHECKING:  # the driver imports torch while workers start, not before
    from tide_core.calibration.executor import IsOver, ModelInfo, Task

Item = TypeVar("Item")
Result = TypeVar("Result")


class RayExecutor:
    def __init__(self, settings: JobSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._pool = Pool(settings, progress)
        self._trainers: list[WorkerTime] = []

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.stop_workers()

    def start_workers(self) -> None:
        """Start the workers without waiting for them."""
        self._pool.start_workers()

    @property
    def model_info(self) -> ModelInfo:
        return self._pool.wait_ready().model_info

    @property
    def model_name(self) -> str:
        return self._pool.wait_ready().model_name

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def worker_times(self) -> Sequence[WorkerTime]:
        return [*self._pool.worker_times(), *self._trainers]

    def map_unordered(
        self, task: Task[Item, Result], items: Sequence[Item], is_over: IsOver = lambda: False
    ) -> Iterator[tuple[Item, Result]]:
        pool, waiting, num_open, num_done = self._pool, deque(items), 0, 0
        pool.start_workers()
        try:
            while waiting or num_open:
                for slot in pool.idle():
                    if waiting:
                        pool.submit(slot, task, waiting.popleft())
                        num_open += 1
                for slot, event in pool.poll():
                    if isinstance(event, TaskDone):
                        item = pool.finish(slot, event)
                        num_open, num_done = num_open - 1, num_done + 1
                        self._progress.note(f"{name_of(item)} by worker {slot.number} in {event.seconds:.1f} s")
                        yield item, event.result
                lost = pool.replace_lost()
                num_open -= len(lost)
                waiting.extendleft(lost)
                if num_done and is_over():
                    waiting.clear()
        finally:
            pool.cancel()

    def run(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        self._pool.start_workers()
        while True:
            with EventDisplay(progress) as display:
                done = self._run_once(task, item, display)
            if done is not None:
                result: Result = done.result
                return result

    def train(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        if self._settings.train_workers == 1:
            return self.run(task, item, progress)
        from deploy.calibration.training import train_together  # Ray Train takes seconds to import

        self._pool.stop_workers()  # training needs their resources
        trained = train_together(self._settings, task, item, progress)
        self._trainers = [
            WorkerTime(f"trainer {each.number}", self._pool.node(each.node), 1, each.seconds, trained.num_restarts)
            for each in trained.times
        ]
        result: Result = trained.result
        return result

    def _run_once(self, task: Any, item: Any, display: EventDisplay) -> TaskDone | None:
        """The end of the task; None if its worker is lost."""
        pool, submitted = self._pool, False
        try:
            while True:
                if not submitted and (idle := pool.idle()):
                    pool.submit(idle[0], task, item)
                    submitted = True
                for slot, event in pool.poll():
                    display.show(event)
                    if isinstance(event, TaskDone):
                        pool.finish(slot, event)
                        return event
                if pool.replace_lost():
                    return None
        finally:
            pool.cancel()
