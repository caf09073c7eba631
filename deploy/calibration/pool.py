"""The workers of a job: their states, their tasks, and the replacement of lost ones."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from deploy.calibration.events import Event, TaskDone
from deploy.calibration.settings import JobSettings
from deploy.calibration.worker import Worker, WorkerReady
from tide_core.calibration.ledger import WorkerTime
from tide_core.calibration.progress import Progress
from tide_core.errors import ConfigError, TideError

POLL_S = 1.0
NOTE_WAITING_S = 20.0
CLOSE_S = 10.0


class JobError(TideError):
    """The cluster could not complete the work."""


@dataclass(eq=False)
class WorkerSlot:
    """One numbered place of the pool, with its current worker."""

    number: int
    actor: Any
    ready_ref: Any
    ready: WorkerReady | None = None
    """None until the model is loaded."""
    item: Any = None
    events: Any = None
    """Stream of events of the current task."""
    last_event_at: float = field(default_factory=time.monotonic)
    num_items: int = 0
    busy_s: float = 0.0
    num_restarts: int = 0

    @property
    def is_idle(self) -> bool:
        return self.ready is not None and self.events is None

    @property
    def next_ref(self) -> Any:
        """Reference of the next message from the worker; None if none is expected."""
        return self.ready_ref if self.ready is None else self.events

    def inherit(self, before: WorkerSlot) -> None:
        """Take the counts of the slot's earlier worker."""
        self.num_items, self.busy_s, self.num_restarts = before.num_items, before.busy_s, before.num_restarts


class Pool:
    def __init__(self, settings: JobSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._slots: list[WorkerSlot] = []
        self._stopped: list[WorkerSlot] = []
        """The slots of stopped workers, for their counts."""
        self._nodes: list[str] = []
        self._lost: list[WorkerSlot] = []
        self._ready: WorkerReady | None = None
        self._ready_at, self._noted_waiting = time.monotonic(), False
        """When a worker was last ready."""
        self._deaths: Counter[int] = Counter()
        """By the identity of the item, or by the negative slot number for a worker without an item."""

    @property
    def num_restarts(self) -> int:
        return sum(slot.num_restarts for slot in self._slots or self._stopped)

    def start_workers(self) -> None:
        """Start a worker in every slot, unless they are running."""
        if not self._slots:
            self._ready_at = time.monotonic()
            self._slots = [self._new(number) for number in range(1, self._settings.workers.count + 1)]
            for slot, before in zip(self._slots, self._stopped, strict=False):
                slot.inherit(before)

    def stop_workers(self) -> None:
        with contextlib.suppress(RayError):  # of a worker that is lost already
            ray.get([slot.actor.close.remote() for slot in self._slots if slot.is_idle], timeout=CLOSE_S)
        for slot in self._slots:
            ray.kill(slot.actor)
        self._stopped, self._slots = self._slots or self._stopped, []

    def wait_ready(self) -> WorkerReady:
        """The message of the first worker that is ready; all load the same model."""
        self.start_workers()
        while self._ready is None:
            self.poll()
            self.replace_lost()
        return self._ready

    def idle(self) -> list[WorkerSlot]:
        return [slot for slot in self._slots if slot.is_idle]

    def submit(self, slot: WorkerSlot, task: Any, item: Any) -> None:
        slot.item, slot.last_event_at = item, time.monotonic()
        slot.events = slot.actor.run.remote(task, item)

    def finish(self, slot: WorkerSlot, done: TaskDone) -> Any:
        """Record the end of the slot's task; returns its item."""
        item, slot.item, slot.events = slot.item, None, None
        slot.num_items += 1
        slot.busy_s += done.seconds
        self._deaths.pop(id(item), None)
        return item

    def cancel(self) -> None:
        """Stop all running tasks by replacing their workers."""
        for index, slot in enumerate(self._slots):
            if slot.events is not None:
                self._slots[index] = self._replacement(slot)

    def poll(self) -> list[tuple[WorkerSlot, Event]]:
        """All events since the last call, waiting briefly for one; records lost and stalled workers."""
        by_ref = {slot.next_ref: slot for slot in self._slots if slot.next_ref is not None and slot not in self._lost}
        if by_ref:
            ray.wait(list(by_ref), num_returns=1, timeout=POLL_S)
            arrived, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        else:
            arrived = []
        events = []
        for slot in (by_ref[ref] for ref in arrived):
            try:
                event = self._receive(slot)
            except RayTaskError as error:
                raise _cause(error) from error
            except RayError as error:
                self._record_lost(slot, f"is lost: {_line(error)}")
                continue
            slot.last_event_at = time.monotonic()
            if event is not None:
                events.append((slot, event))
        for slot in self._slots:
            silent_s = time.monotonic() - slot.last_event_at
            if slot.events is not None and silent_s > self._settings.workers.stall_s and slot not in self._lost:
                self._record_lost(slot, f"is killed: no event from it for {silent_s:.0f} s")
        self._check_ready()  # after receiving: however long the last poll is ago, a ready worker is not late
        return events

    def replace_lost(self) -> list[Any]:
        """Replace lost workers; returns the items of their tasks."""
        items = []
        lost, self._lost = [slot for slot in self._lost if slot in self._slots], []
        for slot in lost:
            self._slots[self._slots.index(slot)] = self._replacement(slot)
            key = -slot.number if slot.item is None else id(slot.item)
            self._deaths[key] += 1
            if self._deaths[key] >= self._settings.workers.attempts:
                what = "a worker could not be started" if slot.item is None else f"{name_of(slot.item)} is given up"
                raise JobError(f"{what}: {self._deaths[key]} workers died in a row; see their logs")
            if slot.item is not None:
                items.append(slot.item)
        return items

    def worker_times(self) -> Sequence[WorkerTime]:
        return [
            WorkerTime(
                f"worker {slot.number}",
                self.node(slot.ready.node) if slot.ready else "not placed",
                slot.num_items,
                slot.busy_s,
                slot.num_restarts,
            )
            for slot in self._slots or self._stopped
        ]

    def node(self, address: str) -> str:
        """A number for a node: reports are published, so they contain no addresses."""
        if address not in self._nodes:
            self._nodes.append(address)
        return f"node {self._nodes.index(address) + 1}"

    def _check_ready(self) -> None:
        """Raise if no worker is ready in time; restart single workers that are late."""
        now, start_s = time.monotonic(), self._settings.workers.start_s
        if any(slot.ready is not None for slot in self._slots):
            self._ready_at, self._noted_waiting = now, False
        waited = now - self._ready_at
        if waited > start_s:
            raise JobError(f"no worker was placed and had its model after {waited:.0f} s; {self._resources()}")
        if waited > NOTE_WAITING_S and not self._noted_waiting:
            self._progress.note(f"waiting for a worker; {self._resources()}")
            self._noted_waiting = True
        for index, slot in enumerate(self._slots):
            if slot.ready is None and now - slot.last_event_at > start_s:
                self._progress.note(f"worker {slot.number} is not placed or has no model after {start_s:.0f} s; again")
                self._slots[index] = self._replacement(slot)

    def _receive(self, slot: WorkerSlot) -> Event | None:
        """The next event of a worker; None if it reported that it is ready."""
        if slot.ready is None:
            slot.ready = ray.get(slot.ready_ref)
            self._ready = self._ready or slot.ready
            if replace(slot.ready.model_info.identity, name="") != replace(self._ready.model_info.identity, name=""):
                expected = f"the same model on every node; {slot.ready.node} has another than {self._ready.node}"
                raise ConfigError("model", self._settings.model, expected)
            self._deaths.pop(-slot.number, None)
            self.node(slot.ready.node)
            return None
        event: Event = ray.get(next(slot.events))
        return event

    def _new(self, number: int) -> WorkerSlot:
        workers = self._settings.workers
        options = Worker.options(  # type: ignore[attr-defined]
            num_cpus=workers.num_cpus, num_gpus=workers.num_gpus, max_restarts=0, runtime_env=self._settings.runtime_env
        )
        actor = options.remote(self._settings)
        return WorkerSlot(number, actor, actor.load.remote())

    def _replacement(self, slot: WorkerSlot) -> WorkerSlot:
        ray.kill(slot.actor)
        new = self._new(slot.number)
        new.inherit(slot)
        new.num_restarts += 1
        return new

    def _record_lost(self, slot: WorkerSlot, why: str) -> None:
        self._lost.append(slot)
        self._progress.note(f"worker {slot.number} {why}")

    def _resources(self) -> str:
        workers = self._settings.workers
        have = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        free = {name: value for name, value in ray.available_resources().items() if name in have}
        asked = f"each asks for {workers.num_cpus:g} CPUs and {workers.num_gpus:g} GPUs"
        return f"{asked}, the cluster has {have}, of which {free} are free"


def name_of(item: Any) -> str:
    return str(getattr(item, "path", None) or getattr(item, "name", None) or type(item).__name__)


def _cause(error: RayTaskError) -> BaseException:
    """The error that the task raised."""
    cause = error.cause
    return cause if isinstance(cause, (TideError, OSError)) else JobError(_line(cause))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
