"""The crew of a job: work is handed to a pool of workers on a Ray cluster.

A worker that dies, or from which nothing is heard for too long, is replaced, and its piece of work is done again: work
depends on its item and the run's files alone, so that is the same work. An error that the work itself raises would come
again elsewhere; it ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.calibration.events import Done, Shown
from deploy.calibration.pool import Pool, name_of
from deploy.calibration.settings import JobSettings
from tide_core.calibration.progress import Progress
from tide_core.calibration.worker_time import WorkerTime

if TYPE_CHECKING:  # the driver imports torch while workers start, not before
    from tide_core.calibration.crew import ModelFacts, Work

Item = TypeVar("Item")
Result = TypeVar("Result")


class RayCrew:
    def __init__(self, settings: JobSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._pool = Pool(settings, progress)
        self._trainers: list[WorkerTime] = []

    def __enter__(self) -> RayCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.let_go()

    def hire(self) -> None:
        """Have workers start, without waiting for them."""
        self._pool.hire()

    @property
    def facts(self) -> ModelFacts:
        return self._pool.hello().facts

    @property
    def model_name(self) -> str:
        return self._pool.hello().model_name

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def times(self) -> Sequence[WorkerTime]:
        return [*self._pool.times(), *self._trainers]

    def each(self, work: Work[Item, Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        pool, waiting, left = self._pool, deque(items), len(items)
        pool.hire()
        try:
            while left:
                for member in pool.free():
                    if waiting:
                        pool.start(member, work, waiting.popleft())
                for member, event in pool.hear():
                    if isinstance(event, Done):
                        item = pool.finish(member, event)
                        left -= 1
                        self._progress.note(f"{name_of(item)} by worker {member.number} in {event.seconds:.1f} s")
                        yield item, event.result
                waiting.extendleft(pool.lost())
        finally:
            pool.drop_work()

    def once(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        self._pool.hire()
        while True:
            with Shown(progress) as shown:
                done = self._once(work, item, shown)
            if done is not None:
                result: Result = done.result
                return result

    def train(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        if self._settings.train_workers == 1:
            return self.once(work, item, progress)
        from deploy.calibration.training import train_together  # Ray Train takes seconds to import

        self._pool.let_go()  # their places are wanted
        trained = train_together(self._settings, work, item, progress)
        self._trainers = [
            WorkerTime(f"trainer {each.number}", self._pool.node(each.node), 1, each.seconds, trained.num_restarts)
            for each in trained.times
        ]
        result: Result = trained.result
        return result

    def _once(self, work: Any, item: Any, shown: Shown) -> Done | None:
        """The end of the work; None if whoever was at it is lost."""
        pool, started = self._pool, False
        try:
            while True:
                if not started and (free := pool.free()):
                    pool.start(free[0], work, item)
                    started = True
                for member, event in pool.hear():
                    shown.show(event)
                    if isinstance(event, Done):
                        pool.finish(member, event)
                        return event
                if pool.lost():
                    return None
        finally:
            pool.drop_work()
