"""The workers of a job: who is there, what each is at, who was lost. One that is lost is replaced at once."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.calibration.events import Done, Event
from deploy.calibration.settings import JobSettings
from deploy.calibration.worker import Hello, Worker
from tide_core.calibration.progress import Progress
from tide_core.calibration.worker_time import WorkerTime
from tide_core.errors import ConfigError, TideError

POLL_S = 1.0
SAY_WAITING_S = 20.0
CLOSE_S = 10.0


class GivenUpError(TideError):
    """The cluster did not let the work be done."""


@dataclass(eq=False)
class Member:
    """One place of the pool, whoever holds it now."""

    number: int
    actor: Any
    hello_ref: Any
    hello: Hello | None = None
    """None until it has its model."""
    item: Any = None
    events: Any = None
    """Of the work it is at."""
    heard_at: float = field(default_factory=time.monotonic)
    num_items: int = 0
    busy_s: float = 0.0
    num_restarts: int = 0

    @property
    def is_free(self) -> bool:
        return self.hello is not None and self.events is None

    @property
    def awaited(self) -> Any:
        """What comes next from it; None if nothing does."""
        return self.hello_ref if self.hello is None else self.events

    def take_over(self, before: Member) -> None:
        """The counts of whoever had the place."""
        self.num_items, self.busy_s, self.num_restarts = before.num_items, before.busy_s, before.num_restarts


class Pool:
    def __init__(self, settings: JobSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._members: list[Member] = []
        self._before: list[Member] = []
        """Who was let go for a while."""
        self._nodes: list[str] = []
        self._gone: list[Member] = []
        self._hello: Hello | None = None
        self._ready_at, self._said_waiting = time.monotonic(), False
        """When somebody was last ready to work."""
        self._deaths: Counter[int] = Counter()
        """By the identity of the item they happened on; before there was one, by the place, as a negative number."""

    @property
    def num_restarts(self) -> int:
        return sum(member.num_restarts for member in self._members or self._before)

    def hire(self) -> None:
        """Have all places filled."""
        if not self._members:
            self._ready_at = time.monotonic()
            self._members = [self._new(number) for number in range(1, self._settings.workers.count + 1)]
            for member, before in zip(self._members, self._before, strict=False):
                member.take_over(before)

    def let_go(self) -> None:
        """Give all places back."""
        with contextlib.suppress(RayError):  # of one that is gone already
            ray.get([member.actor.close.remote() for member in self._members if member.is_free], timeout=CLOSE_S)
        for member in self._members:
            ray.kill(member.actor)
        self._before, self._members = self._members or self._before, []

    def hello(self) -> Hello:
        """What the first worker that is ready says of the model; all of them load the same."""
        self.hire()
        while self._hello is None:
            self.hear()
            self.lost()
        return self._hello

    def free(self) -> list[Member]:
        return [member for member in self._members if member.is_free]

    def start(self, member: Member, work: Any, item: Any) -> None:
        member.item, member.heard_at = item, time.monotonic()
        member.events = member.actor.run.remote(work, item)

    def finish(self, member: Member, done: Done) -> Any:
        """Its work is done; returns the item."""
        item, member.item, member.events = member.item, None, None
        member.num_items += 1
        member.busy_s += done.seconds
        self._deaths.pop(id(item), None)
        return item

    def drop_work(self) -> None:
        """Whatever somebody is still at is wanted no more."""
        for index, member in enumerate(self._members):
            if member.events is not None:
                self._members[index] = self._replacement(member)

    def hear(self) -> list[tuple[Member, Event]]:
        """Everything that has come, waiting a little for something; takes note of who is gone."""
        listened = [member for member in self._members if member.awaited is not None and member not in self._gone]
        by_ref = {member.awaited: member for member in listened}
        if by_ref:
            ray.wait(list(by_ref), num_returns=1, timeout=POLL_S)
            ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        else:
            ready = []
        heard = []
        for member in (by_ref[ref] for ref in ready):
            try:
                event = self._next(member)
            except RayTaskError as error:
                raise _cause(error) from error
            except RayError as error:
                self._note_gone(member, f"is lost: {_line(error)}")
                continue
            member.heard_at = time.monotonic()
            if event is not None:
                heard.append((member, event))
        for member in self._members:
            silent_s = time.monotonic() - member.heard_at
            if member.events is not None and silent_s > self._settings.workers.stall_s and member not in self._gone:
                self._note_gone(member, f"is killed: nothing was heard of it for {silent_s:.0f} s")
        self._check_ready()  # after listening: one that is ready is not late, however long nobody listened
        return heard

    def lost(self) -> list[Any]:
        """Replace those that are gone; returns the items that nobody is at now."""
        items = []
        gone, self._gone = [member for member in self._gone if member in self._members], []
        for member in gone:
            self._members[self._members.index(member)] = self._replacement(member)
            key = -member.number if member.item is None else id(member.item)
            self._deaths[key] += 1
            if self._deaths[key] >= self._settings.workers.attempts:
                what = "a worker could not be started" if member.item is None else f"{name_of(member.item)} is given up"
                raise GivenUpError(f"{what}: {self._deaths[key]} workers died in a row; their logs say more")
            if member.item is not None:
                items.append(member.item)
        return items

    def times(self) -> Sequence[WorkerTime]:
        return [
            WorkerTime(
                f"worker {member.number}",
                self.node(member.hello.node) if member.hello else "not placed",
                member.num_items,
                member.busy_s,
                member.num_restarts,
            )
            for member in self._members or self._before
        ]

    def node(self, address: str) -> str:
        """What a node is called: reports go further than addresses should."""
        if address not in self._nodes:
            self._nodes.append(address)
        return f"node {self._nodes.index(address) + 1}"

    def _check_ready(self) -> None:
        """Somebody must have a place and a model within the time for it; whoever is late is started again."""
        now, start_s = time.monotonic(), self._settings.workers.start_s
        if any(member.hello is not None for member in self._members):
            self._ready_at, self._said_waiting = now, False
        waited = now - self._ready_at
        if waited > start_s:
            raise GivenUpError(f"no worker had its place and its model after {waited:.0f} s; {self._resources()}")
        if waited > SAY_WAITING_S and not self._said_waiting:
            self._progress.note(f"waiting for a worker; {self._resources()}")
            self._said_waiting = True
        for index, member in enumerate(self._members):
            if member.hello is None and now - member.heard_at > start_s:
                self._progress.note(f"worker {member.number} has no place or no model after {start_s:.0f} s; once more")
                self._members[index] = self._replacement(member)

    def _next(self, member: Member) -> Event | None:
        if member.hello is None:
            member.hello = ray.get(member.hello_ref)
            self._hello = self._hello or member.hello
            if replace(member.hello.facts.identity, name="") != replace(self._hello.facts.identity, name=""):
                expected = f"the same model on every node; {member.hello.node} has another than {self._hello.node}"
                raise ConfigError("model", self._settings.model, expected)
            self._deaths.pop(-member.number, None)
            self.node(member.hello.node)
            return None
        event: Event = ray.get(next(member.events))
        return event

    def _new(self, number: int) -> Member:
        workers = self._settings.workers
        places = Worker.options(  # type: ignore[attr-defined]
            num_cpus=workers.num_cpus, num_gpus=workers.num_gpus, max_restarts=0, runtime_env=self._settings.runtime_env
        )
        actor = places.remote(self._settings)
        return Member(number, actor, actor.load.remote())

    def _replacement(self, member: Member) -> Member:
        ray.kill(member.actor)
        new = self._new(member.number)
        new.take_over(member)
        new.num_restarts += 1
        return new

    def _note_gone(self, member: Member, why: str) -> None:
        self._gone.append(member)
        self._progress.note(f"worker {member.number} {why}")

    def _resources(self) -> str:
        workers = self._settings.workers
        have = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        free = {name: value for name, value in ray.available_resources().items() if name in have}
        asked = f"each asks for {workers.num_cpus:g} CPUs and {workers.num_gpus:g} GPUs"
        return f"{asked}, the cluster has {have}, of which {free} are free"


def name_of(item: Any) -> str:
    return str(getattr(item, "path", None) or getattr(item, "name", None) or type(item).__name__)


def _cause(error: RayTaskError) -> BaseException:
    """What the work raised, as it raised it."""
    cause = error.cause
    return cause if isinstance(cause, (TideError, OSError)) else GivenUpError(_line(cause))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
