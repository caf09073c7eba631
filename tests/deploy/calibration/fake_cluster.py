"""A fake of the part of Ray that a pool uses, with a clock that moves only while the driver waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from deploy.calibration import pool
from deploy.calibration.events import TaskDone
from deploy.calibration.settings import JobSettings, read_settings
from deploy.calibration.worker import WorkerReady
from tide_core.calibration.executor import ModelInfo
from tide_core.calibration.progress import SilentProgress
from tide_core.identity import ModelIdentity

SILENCE: Any = object()
"""Nothing comes, and nothing will."""
MAX_IDLE_WAITS = 10_000


def settings(*, train_workers: int = 1, **workers: Any) -> JobSettings:
    of_each = {"start_s": 100.0, "stall_s": 30.0, **workers}
    return read_settings({"name": "run", "storage": "/runs", "train_workers": train_workers, "workers": of_each})


def ready(node: str = "10.0.0.1", *, tokenizer: str = "00") -> WorkerReady:
    identity = ModelIdentity("tiny", "Llama", 3, 8, 64, config_sha256="00", tokenizer_sha256=tokenizer)
    return WorkerReady(ModelInfo(identity, "cpu", 64, (0,), 2), "demo", node)


def raised(cause: Exception) -> RayTaskError:
    """What a worker's work has raised, as Ray gives it to the driver."""
    error = RayTaskError("run", "Traceback", cause, proctitle="worker", pid=1, ip="10.0.0.1")
    return error.as_instanceof_cause()


def died() -> ActorDiedError:
    return ActorDiedError()


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Ref:
    def __init__(self, actor: Actor, *outcomes: Any) -> None:
        self.actor, self._outcomes = actor, list(outcomes)

    @property
    def is_ready(self) -> bool:
        return not self.actor.is_alive or self._outcomes[0] is not SILENCE

    @property
    def is_open(self) -> bool:
        return bool(self._outcomes)

    def answer(self, outcome: Any) -> None:
        """What was silence until now."""
        self._outcomes[0] = outcome

    def take(self) -> Any:
        if not self.actor.is_alive:
            raise died()
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, ActorDiedError):
            self.actor.is_alive = False
        if isinstance(outcome, Exception):
            self._outcomes.clear()
            raise outcome
        return outcome

    def __iter__(self) -> Iterator[Ref]:
        return self

    def __next__(self) -> Ref:
        assert self._outcomes, "nothing comes after the last event"
        return self


class Method:
    def __init__(self, remote: Callable[..., Ref]) -> None:
        self.remote = remote


class Actor:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.number, self.is_alive, self.is_killed, self.is_closed = number, True, False, False
        self.streams: list[Ref] = []
        self.loading = Ref(self, cluster.on_load(number))
        self.load = Method(lambda: self.loading)

        def run(work: Any, item: Any) -> Ref:
            assert not self.is_at_work, "one thing at a time"
            cluster.begun.append((number, item))
            self.streams.append(Ref(self, *cluster.on_run(number, item)))
            return self.streams[-1]

        def close() -> Ref:
            self.is_closed = True
            return Ref(self, cluster.on_close)

        self.run, self.close = Method(run), Method(close)

    @property
    def is_at_work(self) -> bool:
        return self.is_alive and any(stream.is_open for stream in self.streams)


class Cluster:
    """Actors are numbered as they are started, from 0. The hooks return the outcome of each."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.begun: list[tuple[int, Any]] = []
        self.options: list[dict[str, Any]] = []
        self.now, self.on_close, self._idle = 1000.0, None, 0
        self.on_load: Callable[[int], Any] = lambda number: ready()
        self.on_run: Callable[[int, Any], list[Any]] = lambda number, item: [TaskDone(f"{item} done", 2.0)]

    @property
    def at_work(self) -> list[int]:
        return [actor.number for actor in self.actors if actor.is_at_work]

    @property
    def alive(self) -> list[int]:
        return [actor.number for actor in self.actors if actor.is_alive]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = self

        class Places:
            @staticmethod
            def options(**options: Any) -> type[Places]:
                cluster.options.append(options)
                return Places

            @staticmethod
            def remote(settings: JobSettings) -> Actor:
                cluster.actors.append(Actor(cluster, len(cluster.actors)))
                return cluster.actors[-1]

        class Clock:
            @staticmethod
            def monotonic() -> float:
                return cluster.now

        slot = pool.WorkerSlot
        monkeypatch.setattr(pool, "Worker", Places)
        monkeypatch.setattr(pool, "time", Clock)
        monkeypatch.setattr(pool, "WorkerSlot", lambda *args: slot(*args, last_event_at=cluster.now))
        for name in ("wait", "get", "kill"):
            monkeypatch.setattr(ray, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0})
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.5, "memory": 1e9})

    def _wait(self, refs: list[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.is_ready]
        if not ready:
            self.now += timeout
            self._idle += 1
            assert self._idle < MAX_IDLE_WAITS, "the driver waits for ever"
        return ready[:num_returns], ready[num_returns:] + [ref for ref in refs if not ref.is_ready]

    def _get(self, refs: Ref | list[Ref], timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self._get(ref, timeout) for ref in refs]
        if not refs.is_ready:
            assert timeout is not None, "the driver waits for ever"
            raise GetTimeoutError
        return refs.take()

    def _kill(self, actor: Actor) -> None:
        actor.is_alive, actor.is_killed = False, True
