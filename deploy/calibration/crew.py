"""The crew of a job: a pool of workers on a Ray cluster.

A worker that dies, or from which nothing is heard for too long, is replaced, and its piece of work is done again: work
depends on its item and the run's files alone, so that is the same work. An error that the work itself raises would come
again elsewhere; it ends the run.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.calibration.events import Done, Event, Shown
from deploy.calibration.settings import JobSettings
from deploy.calibration.training import train_together
from deploy.calibration.worker import Hello, Worker
from tide_core.calibration.crew import ModelFacts, Work
from tide_core.calibration.progress import Progress
from tide_core.calibration.report_data import WorkerTime
from tide_core.errors import TideError

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_S = 1.0


class GivenUpError(TideError):
    """The cluster did not let the work be done."""


@dataclass(eq=False)
class _Member:
    """One place of the pool, whoever holds it now."""

    number: int
    actor: Any
    hello_ref: Any
    hello: Hello | None = None
    events: Any = None
    """Of the work it is at."""
    item: Any = None
    heard_at: float = field(default_factory=time.monotonic)
    num_items: int = 0
    busy_s: float = 0.0
    num_restarts: int = 0

    @property
    def is_free(self) -> bool:
        return self.hello is not None and self.events is None

    def take_over(self, before: _Member) -> None:
        """The counts of whoever had the place."""
        self.num_items, self.busy_s, self.num_restarts = before.num_items, before.busy_s, before.num_restarts


class RayCrew:
    def __init__(self, settings: JobSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._members: list[_Member] = []
        self._before: list[_Member] = []
        """Who was let go for a while."""
        self._nodes: list[str] = []
        self._gone: list[_Member] = []
        self._hello: Hello | None = None
        self._deaths: Counter[int] = Counter()  # by the identity of the item they happened on
        self._early_deaths = 0

    def __enter__(self) -> RayCrew:
        self._hire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._let_go()

    @property
    def facts(self) -> ModelFacts:
        return self._first().facts

    @property
    def model_name(self) -> str:
        return self._first().model_name

    @property
    def num_restarts(self) -> int:
        return sum(member.num_restarts for member in self._members or self._before)

    def times(self) -> Sequence[WorkerTime]:
        return [
            WorkerTime(
                f"worker {member.number}",
                f"node {self._nodes.index(member.hello.node) + 1}" if member.hello else "none yet",
                member.num_items,
                member.busy_s,
                member.num_restarts,
            )
            for member in self._members or self._before
        ]

    def each(self, work: Work[Item, Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        self._hire()
        waiting = deque(items)
        left = len(waiting)
        try:
            while left:
                for member in self._members:
                    if waiting and member.is_free:
                        self._start(member, work, waiting.popleft())
                for member, event in self._heard():
                    if isinstance(event, Done):
                        item = self._finish(member, event)
                        left -= 1
                        self._progress.note(f"{_name(item)} by worker {member.number} in {event.seconds:.1f} s")
                        yield item, event.result
                waiting.extendleft(self._lost())
        finally:
            self._drop_work()

    def once(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        self._hire()
        while True:
            with Shown(progress) as shown:
                done = self._once(work, item, shown)
            if done is not None:
                result: Result = done.result
                return result

    def train(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        if self._settings.train_workers == 1:
            return self.once(work, item, progress)
        self._let_go()  # their places are wanted
        result: Result = train_together(self._settings, work, item, progress)
        return result

    def _once(self, work: Any, item: Any, shown: Shown) -> Done | None:
        """The end of the work; None if its worker was lost."""
        mine: _Member | None = None
        try:
            while True:
                if mine is None and (mine := next((each for each in self._members if each.is_free), None)) is not None:
                    self._start(mine, work, item)
                for member, event in self._heard():
                    shown.show(event)
                    if isinstance(event, Done):
                        self._finish(member, event)
                        return event
                if self._lost():
                    return None
        finally:
            self._drop_work()

    # --- members

    def _hire(self) -> None:
        if not self._members:
            self._members = [self._new(number) for number in range(1, self._settings.workers.count + 1)]
            for member, before in zip(self._members, self._before, strict=False):
                member.take_over(before)

    def _new(self, number: int) -> _Member:
        workers = self._settings.workers
        actor = Worker.options(  # type: ignore[attr-defined]
            num_cpus=workers.num_cpus, num_gpus=workers.num_gpus, max_restarts=0
        ).remote(self._settings)
        return _Member(number, actor, actor.load.remote())

    def _let_go(self) -> None:
        for member in self._members:
            ray.kill(member.actor)
        self._before, self._members = self._members or self._before, []

    def _first(self) -> Hello:
        """What the first worker that is ready says of the model; all of them load the same."""
        self._hire()
        started, told = time.monotonic(), False
        while self._hello is None:
            self._heard()
            self._lost()
            waited = time.monotonic() - started
            if waited > self._settings.workers.start_s:
                raise GivenUpError(f"no worker had its place and its model after {waited:.0f} s; {_resources()}")
            if waited > 30 and not told:
                self._progress.note(f"waiting for a worker: {self._asked()}; {_resources()}")
                told = True
        return self._hello

    def _asked(self) -> str:
        workers = self._settings.workers
        return f"each asks for {workers.num_cpus:g} CPUs and {workers.num_gpus:g} GPUs"

    # --- work

    def _start(self, member: _Member, work: Any, item: Any) -> None:
        member.item, member.heard_at = item, time.monotonic()
        member.events = member.actor.run.remote(work, item)

    def _finish(self, member: _Member, done: Done) -> Any:
        item, member.item, member.events = member.item, None, None
        member.num_items += 1
        member.busy_s += done.seconds
        return item

    def _drop_work(self) -> None:
        """Of a run that ends in the middle: nobody goes on with it."""
        for index, member in enumerate(self._members):
            if member.events is not None:
                ray.kill(member.actor)
                self._members[index] = self._again(member)

    def _heard(self) -> list[tuple[_Member, Event]]:
        """Everything that has come from members, waiting a little for something; notes who is gone."""
        by_ref = {}
        for member in self._members:
            ref = member.hello_ref if member.hello is None else member.events
            if ref is not None:
                by_ref[ref] = member
        ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=POLL_S)
        more, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0) if by_ref else ([], [])
        heard = []
        for ref in {*ready, *more}:
            member = by_ref[ref]
            try:
                event = self._next(member)
            except RayTaskError as error:
                raise _cause(error) from error
            except RayError as error:
                self._gone.append(member)
                self._progress.note(f"worker {member.number} is lost: {_line(error)}")
                continue
            member.heard_at = time.monotonic()
            if event is not None:
                heard.append((member, event))
        for member in self._members:
            if member not in self._gone and self._is_stuck(member):
                self._gone.append(member)
                silent = time.monotonic() - member.heard_at
                self._progress.note(f"worker {member.number} is killed: nothing was heard of it for {silent:.0f} s")
        return heard

    def _next(self, member: _Member) -> Event | None:
        if member.hello is None:
            member.hello = self._hello = ray.get(member.hello_ref)
            if member.hello.node not in self._nodes:
                self._nodes.append(member.hello.node)
            self._early_deaths = 0
            return None
        event: Event = ray.get(next(member.events))
        return event

    def _is_stuck(self, member: _Member) -> bool:
        return member.events is not None and time.monotonic() - member.heard_at > self._settings.workers.stall_s

    def _lost(self) -> list[Any]:
        """Replace those that are gone; returns the items that nobody has done now."""
        items = []
        for member in self._gone:
            ray.kill(member.actor)
            self._members[self._members.index(member)] = self._again(member)
            if member.events is None:
                self._early_deaths += 1
                if self._early_deaths > self._settings.workers.attempts * self._settings.workers.count:
                    raise GivenUpError(f"{self._early_deaths} workers died before they were ready; see their logs")
                continue
            self._deaths[id(member.item)] += 1
            if self._deaths[id(member.item)] >= self._settings.workers.attempts:
                raise GivenUpError(
                    f"{_name(member.item)} is given up: {self._deaths[id(member.item)]} workers died on it"
                )
            items.append(member.item)
        self._gone = []
        return items

    def _again(self, member: _Member) -> _Member:
        new = self._new(member.number)
        new.take_over(member)
        new.num_restarts += 1
        return new


def _name(item: Any) -> str:
    return str(getattr(item, "path", None) or getattr(item, "name", None) or type(item).__name__)


def _cause(error: RayTaskError) -> BaseException:
    """What the work raised, as it raised it."""
    cause = error.cause
    return cause if isinstance(cause, (TideError, OSError)) else GivenUpError(_line(cause))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _resources() -> str:
    have = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    free = {name: value for name, value in ray.available_resources().items() if name in have}
    return f"the cluster has {have}, of which {free} are free"
