"""Training by several processes at once: Ray Train starts them and starts them again, and they train as one does.

One death ends them all; then all go on from the last state that the first one has saved in the run.
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

from deploy.calibration.events import Done, Event, Failed, Noted, Shown, Teller, Took
from deploy.calibration.settings import JobSettings
from deploy.calibration.storage import place_of, remove
from deploy.calibration.worker import beside_the_driver, workshop_of
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.errors import TideError

POLL_S = 0.5
RAY_FOLDER = "ray"
"""In the run: what Ray Train keeps there while it trains."""
START_TRY_S = 30.0
"""How long Ray Train waits for the places of all workers before it tries again, at least."""


class TrainingError(TideError):
    """A training of several that could not be done."""


@dataclass(frozen=True, slots=True)
class _Task:
    settings: JobSettings
    work: Any
    item: Any
    board: Any


@dataclass(frozen=True, slots=True)
class Trained:
    result: Any
    """Of the first of them."""
    times: list[Took]
    num_restarts: int
    """Of all at once."""


def train_together(settings: JobSettings, work: Any, item: Any, progress: Progress) -> Trained:
    board = _Board.options(scheduling_strategy=beside_the_driver()).remote()  # type: ignore[attr-defined]
    workers = settings.workers
    trainer = TorchTrainer(
        _train,
        train_loop_config={"task": _Task(settings, work, item, board)},
        torch_config=TorchConfig(timeout_s=int(workers.stall_s) or 1),
        scaling_config=ScalingConfig(
            num_workers=settings.train_workers,
            use_gpu=workers.num_gpus > 0,
            resources_per_worker={"CPU": workers.num_cpus, **({"GPU": workers.num_gpus} if workers.num_gpus else {})},
        ),
        run_config=RunConfig(
            name=f"train-{secrets.token_hex(4)}",
            storage_path=place_of(settings.storage, settings.name, RAY_FOLDER),
            failure_config=FailureConfig(
                max_failures=workers.attempts - 1,
                controller_failure_limit=max(workers.attempts, int(workers.start_s / START_TRY_S)),
            ),
            worker_runtime_env=settings.runtime_env,
        ),
    )
    with _Reader(board, progress) as reader:
        try:
            trainer.fit()
        except Exception as error:  # Ray's own, around whatever a worker raised
            if (cause := reader.last_failure()) is not None:
                raise cause from error
            raise TrainingError(f"{settings.train_workers} workers could not train: {_line(error)}") from error
        finally:
            remove(settings.storage, settings.name, RAY_FOLDER)
    if (cause := reader.last_failure()) is not None:
        raise cause
    if reader.done is None:
        raise TrainingError("the workers have ended without a result")
    times = [reader.times[number] for number in sorted(reader.times)]
    return Trained(reader.done.result, times, ray.get(board.num_restarts.remote()))


def _train(config: dict[str, Any]) -> None:
    """In each of the processes."""
    from tide_core.calibration.run import use_threads
    from tide_core.calibration.train.group import TorchGroup

    task: _Task = config["task"]
    use_threads(task.settings.threads)
    started, group = time.monotonic(), TorchGroup()
    tell = task.board.tell.remote
    if ray.get(task.board.is_given_up.remote()):
        return  # Ray Train starts everybody again, whatever the reason was
    if group.rank == 0 and (num := ray.get(task.board.begin.remote())) > 1:
        why = f"one of the {group.size} workers is lost; all begin again from the last state"
        tell(Noted(f"train: {why}, restart {num - 1}"))
    try:
        with contextlib.ExitStack() as stack:
            workshop, _ = workshop_of(task.settings, stack, group)
            result = task.work(workshop, task.item, Teller(tell) if group.rank == 0 else SilentProgress())
    except (TideError, OSError) as error:
        ray.get(tell(Failed(error)))
        raise
    seconds = time.monotonic() - started
    ray.get(tell(Took(group.rank + 1, ray.util.get_node_ip_address(), seconds)))
    if group.rank == 0:
        ray.get(tell(Done(result, seconds)))


@ray.remote(num_cpus=0)
class _Board:
    """Where the first of the workers puts what it tells."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_starts = 0
        self._is_given_up = False

    def begin(self) -> int:
        """How often the workers have been started."""
        self._num_starts += 1
        return self._num_starts

    def num_restarts(self) -> int:
        return self._num_starts - 1

    def is_given_up(self) -> bool:
        """Whether the work itself has failed, which it would do again."""
        return self._is_given_up

    def tell(self, event: Event) -> None:
        self._is_given_up |= isinstance(event, Failed)
        self._events.append(event)

    def read(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _Reader:
    """Shows what is on the board while the main thread waits for the training."""

    def __init__(self, board: Any, progress: Progress) -> None:
        self._board, self._progress = board, progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tide-board", daemon=True)
        self.done: Done | None = None
        self.times: dict[int, Took] = {}
        """Of each, by its number; of one that began again, the last."""
        self._failure: BaseException | None = None

    def last_failure(self) -> BaseException | None:
        """What the work itself raised, if it did."""
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
        with Shown(self._progress) as shown:
            last = False
            while not last:
                last = self._stop.wait(POLL_S)  # once more after the end
                for event in ray.get(self._board.read.remote()):
                    if isinstance(event, Done):
                        self.done = event
                    elif isinstance(event, Took):
                        self.times[event.number] = event
                    elif isinstance(event, Failed):
                        self._failure = event.error
                    else:
                        shown.show(event)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
