"""A worker: one process of the cluster with the model in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.calibration import storage
from deploy.calibration.events import Event, events_of
from deploy.calibration.settings import JobSettings
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.crew import ModelFacts, Workshop
    from tide_core.calibration.progress import Progress
    from tide_core.calibration.train.group import Group

SEEN = ".seen"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says when it has its model."""

    facts: ModelFacts
    model_name: str
    node: str


@ray.remote
class Worker:
    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._open = contextlib.ExitStack()
        self._workshop: Workshop | None = None

    def load(self) -> Hello:
        """Not in `__init__`: what is wrong with a model or a storage is no reason to try again elsewhere."""
        self._workshop, name = workshop_of(self._settings, self._open)
        return Hello(self._workshop.facts, name, ray.util.get_node_ip_address())

    def close(self) -> None:
        """Leave nothing behind."""
        self._open.close()

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def run(self, work: Any, item: Any) -> Iterator[Event]:
        """What the work tells, and in the end its result."""

        def do(progress: Progress) -> Any:
            from tide_core.calibration.run import use_threads

            use_threads(self._settings.threads)  # each thread has a number of its own
            return work(self._workshop, item, progress)

        yield from events_of(do)


def beside_the_driver() -> Any:
    """Where an actor of the driver's own belongs: it lives as long as the driver's node does."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def workshop_of(settings: JobSettings, open_: contextlib.ExitStack, group: Group | None = None) -> tuple[Workshop, str]:
    """The model, loaded, beside the files of the run, and what a command calls it."""
    from tide_core.calibration.crew import Workshop
    from tide_core.calibration.run import load
    from tide_core.calibration.train.group import ALONE

    files = open_.enter_context(storage.opened(settings.storage, settings.name))
    if "://" not in settings.storage and not (files.folder / SEEN).exists():
        place, node = Path(settings.storage), ray.util.get_node_ip_address()
        raise ConfigError(
            "storage", place, f"a folder that every node sees; node {node} does not see run {settings.name}"
        )
    loaded = load(settings.model, dtype=settings.dtype, device=settings.device, threads=settings.threads)
    made = Workshop(settings.config, loaded.model, loaded.tokenizer, loaded.identity, files, group or ALONE)
    return made, loaded.name
