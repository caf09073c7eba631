"""Data-parallel training: one result, one display, and an error of the task itself ends it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.calibration import training
from deploy.calibration.events import Note, StageStarted, StageUpdated, TaskDone, TaskFailed, TrainerDone
from deploy.calibration.settings import JobSettings, read_settings
from deploy.calibration.training import TrainingError, train_together
from tests.deploy.calibration.test_events import ProgressLog
from tide_core.calibration import named_model
from tide_core.calibration.train import process_group
from tide_core.errors import ConfigError

Mailbox = training._Mailbox.__ray_metadata__.modified_class


class Near:
    """An actor in this process."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._of, name))


class Trainer:
    """What is asked of Ray Train. `fit` is what happens in it: the processes of a rank are begun by `begin`."""

    fit_: Callable[[Trainer], None] = staticmethod(lambda trainer: trainer.begin(1, 0))

    def __init__(self, loop: Callable[[Any], None], **asked: Any) -> None:
        self._loop, self.asked = loop, asked
        Trainer.last = self

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            Trainer.rank = rank
            self._loop(self.asked["train_loop_config"])

    def fit(self) -> None:
        folder = Path(self.asked["run_config"].storage_path)
        folder.mkdir(parents=True)
        (folder / "kept").touch()
        Trainer.fit_(self)

    last: Trainer
    rank = 0


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Mailbox()
    places = SimpleNamespace(remote=lambda: Near(made))
    monkeypatch.setattr(training, "_Mailbox", SimpleNamespace(options=lambda **_: places))
    monkeypatch.setattr(training, "on_driver_node", lambda: None)
    monkeypatch.setattr(training, "TorchTrainer", Trainer)
    monkeypatch.setattr(training, "POLL_S", 0.01)
    monkeypatch.setattr(training, "load_context", lambda settings, stack, group: (group, "demo"))
    monkeypatch.setattr(process_group, "TorchProcessGroup", lambda: SimpleNamespace(rank=Trainer.rank, size=2))
    monkeypatch.setattr(named_model, "use_threads", lambda threads: None)
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: f"10.0.0.{Trainer.rank + 1}")
    monkeypatch.setattr(Trainer, "fit_", Trainer.fit_)
    return made


def settings(tmp_path: Path, **workers: Any) -> JobSettings:
    return read_settings({"name": "run", "storage": str(tmp_path), "train_workers": 2, "workers": workers})


def work(context: Any, item: str, progress: Any) -> str:
    with progress.stage("train", 5, "step") as stage:
        stage.update(5)
    return f"{item} by {context.rank}"


def test_the_result_is_that_of_the_first_and_only_the_first_is_shown(mailbox: Any, tmp_path: Path) -> None:
    log = ProgressLog()
    trained = train_together(settings(tmp_path), work, "heads", log)
    assert trained.result == "heads by 0"
    assert [(each.number, each.node) for each in trained.times] == [(1, "10.0.0.1"), (2, "10.0.0.2")]
    assert all(each.seconds >= 0 for each in trained.times)
    assert trained.num_restarts == 0
    assert log.lines == ["begin train 5 step", "update 5 {}", "end train"]


def test_a_restart_is_noted_and_counted_once_for_all(mailbox: Any, tmp_path: Path) -> None:
    def lost_once(trainer: Trainer) -> None:
        assert mailbox.begin() == 1  # by a first one who was lost
        trainer.begin(0, 1)

    Trainer.fit_ = lost_once
    log = ProgressLog()
    trained = train_together(settings(tmp_path), work, "heads", log)
    assert trained.num_restarts == 1
    expected = "note train: one of the 2 workers is lost; all restart from the last state, restart 1"
    assert [line for line in log.lines if line.startswith("note")] == [expected]


@pytest.mark.parametrize("received", ["raised", "swallowed"])
@pytest.mark.parametrize("error", [ConfigError("data", "x", "y"), OSError(28, "No space left")], ids=repr)
def test_what_the_work_itself_raises_is_raised_as_it_is_and_not_tried_again(
    mailbox: Any, tmp_path: Path, error: Exception, received: str
) -> None:
    tried = []

    def fails(*args: Any) -> None:
        tried.append(args)
        raise error

    def fit(trainer: Trainer) -> None:
        with pytest.raises(type(error)):
            trainer.begin(1)
        trainer.begin(0, 1)  # Ray Train restarts all processes
        if received == "raised":
            raise RuntimeError("of Ray Train")

    Trainer.fit_ = fit
    with pytest.raises(type(error)) as caught:
        train_together(settings(tmp_path), fails, "heads", ProgressLog())
    assert caught.value is error
    assert len(tried) == 1


def test_an_unexpected_error_is_left_to_ray_train(mailbox: Any, tmp_path: Path) -> None:
    """The machine may be the cause, so Ray Train retries; the last error becomes one line."""

    def fails(*args: Any) -> None:
        raise RuntimeError("of the\nmachine")

    Trainer.fit_ = lambda trainer: trainer.begin(0)
    with pytest.raises(TrainingError, match="2 workers could not train: of the machine"):
        train_together(settings(tmp_path), fails, "heads", ProgressLog())
    assert not mailbox.has_failed()


def test_an_end_without_a_result_is_an_error(mailbox: Any, tmp_path: Path) -> None:
    Trainer.fit_ = lambda trainer: trainer.begin(1)
    with pytest.raises(TrainingError, match="without a result"):
        train_together(settings(tmp_path), work, "heads", ProgressLog())


@pytest.mark.parametrize("ends_well", [True, False])
def test_nothing_that_ray_train_keeps_stays_in_the_run(mailbox: Any, tmp_path: Path, ends_well: bool) -> None:
    (tmp_path / "run" / "shards").mkdir(parents=True)
    Trainer.fit_ = lambda trainer: trainer.begin(1, 0) if ends_well else trainer.begin(1)
    try:
        train_together(settings(tmp_path), work, "heads", ProgressLog())
    except TrainingError:
        assert not ends_well
    assert Path(Trainer.last.asked["run_config"].storage_path) == tmp_path / "run" / "ray"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["shards"]


def test_ray_train_is_asked_for_the_places_and_the_patience_of_the_settings(mailbox: Any, tmp_path: Path) -> None:
    asked = settings(tmp_path, num_cpus=2.0, num_gpus=1.0, attempts=4, start_s=600.0, stall_s=90.0, threads=3)
    train_together(asked, work, "heads", ProgressLog())
    scaling, run_config = Trainer.last.asked["scaling_config"], Trainer.last.asked["run_config"]
    assert (scaling.num_workers, scaling.use_gpu) == (2, True)
    assert scaling.resources_per_worker == {"CPU": 2.0, "GPU": 1.0}
    failures = run_config.failure_config
    assert failures.max_failures == 3, "so many may die as on any other piece of work"
    assert failures.controller_failure_limit == 20, "it waits for places as long as a pool does"
    assert run_config.worker_runtime_env == {"env_vars": {"OMP_NUM_THREADS": "3"}}
    assert Trainer.last.asked["torch_config"].timeout_s == 90, "one that hangs is not waited for longer"


def test_everything_in_the_mailbox_is_read_once_and_a_failure_is_recorded() -> None:
    mailbox = Mailbox()
    received = [
        StageStarted("train", 5, "step"),
        StageUpdated(5),
        Note("ready"),
        TrainerDone(1, "10.0.0.1", 1.0),
        TaskDone("result", 1.0),
    ]
    for event in received:
        mailbox.send(event)
    assert mailbox.read() == received
    assert mailbox.read() == []
    assert not mailbox.has_failed()
    mailbox.send(TaskFailed(ConfigError("data", "x", "y")))
    mailbox.send(Note("later"))
    assert mailbox.has_failed()
