"""A worker: one process of the cluster with the model loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.calibration import storage
from deploy.calibration.events import Event, run_with_events
from deploy.calibration.settings import JobSettings
from deploy.object_store import is_url
from deploy.weights import local_model
from tide_core.errors import ConfigError
from tide_core.models.quick_start import quick_start

if TYPE_CHECKING:
    from tide_core.calibration.executor import ModelInfo, StageContext
    from tide_core.calibration.progress import Progress
    from tide_core.calibration.train.process_group import ProcessGroup

SEEN = ".seen"
"""A file that the driver writes into a folder storage, so that workers can check that they see the same folder."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The message of a worker that has loaded its model."""

    model_info: ModelInfo
    model_name: str
    node: str


@ray.remote
class Worker:
    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._open = contextlib.ExitStack()
        self._context: StageContext | None = None

    def load(self) -> WorkerReady:
        """Not in `__init__`: an error of the model or the storage must end the job, not restart the worker."""
        self._context, name = load_context(self._settings, self._open)
        return WorkerReady(self._context.model_info, name, ray.util.get_node_ip_address())

    def close(self) -> None:
        """Remove the worker's files."""
        self._open.close()

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def run(self, task: Any, item: Any) -> Iterator[Event]:
        """The events of a task; the last one carries its result."""

        def run_task(progress: Progress) -> Any:
            from tide_core.calibration.named_model import use_threads

            use_threads(self._settings.threads)  # torch keeps the number per thread
            return task(self._context, item, progress)

        yield from run_with_events(run_task)


def on_driver_node() -> Any:
    """Scheduling of an actor that belongs to the driver: it lives as long as the driver's node does."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def load_context(
    settings: JobSettings, open_: contextlib.ExitStack, group: ProcessGroup | None = None
) -> tuple[StageContext, str]:
    """The loaded model with the files of the run, and the model's name for a command."""
    from tide_core.calibration.executor import StageContext
    from tide_core.calibration.named_model import load
    from tide_core.calibration.train.process_group import SINGLE_PROCESS

    files = open_.enter_context(storage.open_run(settings.storage, settings.name))
    if not is_url(settings.storage) and not (files.folder / SEEN).exists():
        place, node = Path(settings.storage), ray.util.get_node_ip_address()
        raise ConfigError(
            "storage", place, f"a folder that every node sees; node {node} does not see run {settings.name}"
        )
    with quick_start():
        loaded = load(
            local_model(settings.model),
            dtype=settings.dtype,
            device=settings.device,
            quantization=settings.quantization,
            threads=settings.threads,
        )
    context = StageContext(
        settings.config, loaded.model, loaded.tokenizer, loaded.identity, files, group or SINGLE_PROCESS
    )
    return context, loaded.name
