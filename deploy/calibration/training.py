"""Data-parallel training with Ray Train, which starts and restarts the processes.

If one process dies, all are restarted and continue from the last state that rank 0 has saved in the run.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from deploy.calibration.events import Event, EventDisplay, EventProgress, Note, TaskDone, TaskFailed, TrainerDone
from deploy.calibration.settings import JobSettings
from deploy.calibration.storage import remove
from deploy.calibration.worker import load_context, on_driver_node
from deploy.object_store import location
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.errors import TideError

POLL_S = 0.5
RAY_FOLDER = "ray"
"""Folder of Ray Train in the run, removed after training."""
START_TRY_S = 30.0
"""Minimum time that Ray Train waits for the resources of all workers before it tries again."""


class TrainingError(TideError):
    """Data-parallel training failed."""


@dataclass(frozen=True, slots=True)
class _Job:
    settings: JobSettings
    task: Any
    item: Any
    mailbox: Any


@dataclass(frozen=True, slots=True)
class Trained:
    result: Any
    """Of rank 0."""
    times: list[TrainerDone]
    num_restarts: int
    """Of all processes together."""


def train_together(settings: JobSettings, task: Any, item: Any, progress: Progress) -> Trained:
    """Run the task on all training processes; rank 0 returns the result."""
    mailbox = _Mailbox.options(scheduling_strategy=on_driver_node()).remote()  # type: ignore[attr-defined]
    workers = settings.workers
    trainer = TorchTrainer(
        _train,
        train_loop_config={"job": _Job(settings, task, item, mailbox)},
        torch_config=TorchConfig(timeout_s=int(workers.stall_s) or 1),
        scaling_config=ScalingConfig(
            num_workers=settings.train_workers,
            use_gpu=workers.num_gpus > 0,
            resources_per_worker={"CPU": workers.num_cpus, **({"GPU": workers.num_gpus} if workers.num_gpus else {})},
        ),
        run_config=RunConfig(
            name=f"train-{secrets.token_hex(4)}",
            storage_path=location(settings.storage, settings.name, RAY_FOLDER),
            failure_config=FailureConfig(
                max_failures=workers.attempts - 1,
                controller_failure_limit=max(workers.attempts, int(workers.start_s / START_TRY_S)),
            ),
            worker_runtime_env=settings.runtime_env,
        ),
    )
    with _Reader(mailbox, progress) as reader:
        try:
            trainer.fit()
        except Exception as error:  # Ray wraps the error of a worker
            if (cause := reader.last_failure()) is not None:
                raise cause from error
            raise TrainingError(f"{settings.train_workers} workers could not train: {_line(error)}") from error
        finally:
            remove(settings.storage, settings.name, RAY_FOLDER)
    if (cause := reader.last_failure()) is not None:
        raise cause
    if reader.done is None:
        raise TrainingError("the workers ended without a result")
    times = [reader.times[number] for number in sorted(reader.times)]
    return Trained(reader.done.result, times, ray.get(mailbox.num_restarts.remote()))


def _train(config: dict[str, Any]) -> None:
    """Runs in every process."""
    from tide_core.calibration.named_model import use_threads
    from tide_core.calibration.train.process_group import TorchProcessGroup

    job: _Job = config["job"]
    use_threads(job.settings.threads)
    started, group = time.monotonic(), TorchProcessGroup()
    send = job.mailbox.send.remote
    if ray.get(job.mailbox.has_failed.remote()):
        return  # Ray Train restarts all processes whatever the reason was
    if group.rank == 0 and (num := ray.get(job.mailbox.begin.remote())) > 1:
        why = f"one of the {group.size} workers is lost; all restart from the last state"
        send(Note(f"train: {why}, restart {num - 1}"))
    try:
        with contextlib.ExitStack() as stack:
            context, _ = load_context(job.settings, stack, group)
            result = job.task(context, job.item, EventProgress(send) if group.rank == 0 else SilentProgress())
    except (TideError, OSError) as error:
        ray.get(send(TaskFailed(error)))
        raise
    seconds = time.monotonic() - started
    ray.get(send(TrainerDone(group.rank + 1, ray.util.get_node_ip_address(), seconds)))
    if group.rank == 0:
        ray.get(send(TaskDone(result, seconds)))


@ray.remote(num_cpus=0)
class _Mailbox:
    """Collects the events of the training processes for the driver."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_starts = 0
        self._has_failed = False

    def begin(self) -> int:
        """Count a start of the processes; returns the number of starts."""
        self._num_starts += 1
        return self._num_starts

    def num_restarts(self) -> int:
        return self._num_starts - 1

    def has_failed(self) -> bool:
        """Whether the task itself has failed; it would fail again."""
        return self._has_failed

    def send(self, event: Event) -> None:
        self._has_failed |= isinstance(event, TaskFailed)
        self._events.append(event)

    def read(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _Reader:
    """Shows the events in the mailbox while the main thread waits for the training."""

    def __init__(self, mailbox: Any, progress: Progress) -> None:
        self._mailbox, self._progress = mailbox, progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tide-mailbox", daemon=True)
        self.done: TaskDone | None = None
        self.times: dict[int, TrainerDone] = {}
        """By number of the process; after a restart, the last one."""
        self._failure: BaseException | None = None

    def last_failure(self) -> BaseException | None:
        """The error that the task raised, if it did."""
        self._stop.set()
        self._thread.join()
        return self._failure

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with EventDisplay(self._progress) as display:
            last = False
            while not last:
                last = self._stop.wait(POLL_S)  # read once more after the end
                for event in ray.get(self._mailbox.read.remote()):
                    if isinstance(event, TaskDone):
                        self.done = event
                    elif isinstance(event, TrainerDone):
                        self.times[event.number] = event
                    elif isinstance(event, TaskFailed):
                        self._failure = event.error
                    else:
                        display.show(event)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
