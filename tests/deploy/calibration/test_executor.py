"""The executor of a job: every item once, whichever worker dies, and no task left running at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.calibration import training
from deploy.calibration.events import StageStarted, StageUpdated, TaskDone, TrainerDone
from deploy.calibration.executor import RayExecutor
from deploy.calibration.pool import JobError
from tests.deploy.calibration.fake_cluster import SILENCE, Cluster, Notes, died, raised, ready, settings
from tests.deploy.calibration.test_events import ProgressLog
from tide_core.calibration.ledger import WorkerTime
from tide_core.errors import ConfigError

ITEMS = [f"item {number}" for number in range(7)]


def work(*args: Any) -> None:
    """A task that no test runs."""


def executor_of(progress: Any = None, *, train_workers: int = 1, **workers: Any) -> RayExecutor:
    return RayExecutor(settings(train_workers=train_workers, **workers), progress or Notes())


@pytest.mark.parametrize("count", [1, 3, 20])
def test_every_item_is_done_once_and_comes_with_its_own_result(cluster: Cluster, count: int) -> None:
    notes = Notes()
    done = list(executor_of(notes, count=count).map_unordered(work, ITEMS))
    assert sorted(done) == [(item, f"{item} done") for item in ITEMS]
    assert sorted(item for _, item in cluster.begun) == ITEMS
    assert len({number for number, _ in cluster.begun}) == min(count, len(ITEMS)), "all who are there have a share"
    assert "str by worker 1 in 2.0 s" in notes.lines


def test_an_item_whose_worker_dies_is_done_again_once_and_no_other_is(cluster: Cluster) -> None:
    struck: list[str] = []

    def on_run(number: int, item: str) -> list[Any]:
        if item == ITEMS[3] and not struck:
            struck.append(item)
            return [died()]
        return [TaskDone(f"{item} done", 2.0)]

    cluster.on_run = on_run
    executor = executor_of(count=2)
    assert sorted(executor.map_unordered(work, ITEMS)) == [(item, f"{item} done") for item in ITEMS]
    assert Counter(item for _, item in cluster.begun) == {**dict.fromkeys(ITEMS, 1), ITEMS[3]: 2}
    assert executor.num_restarts == 1
    assert sum(each.num_items for each in executor.worker_times()) == len(ITEMS)
    assert sum(each.busy_s for each in executor.worker_times()) == 2.0 * len(ITEMS)


def test_an_item_that_was_lost_is_the_next_to_be_done(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()] if number == 0 else [TaskDone(None, 1.0)]
    assert [item for item, _ in executor_of().map_unordered(work, ITEMS)] == ITEMS


def test_after_the_end_of_the_time_no_item_begins_and_those_that_run_are_finished(cluster: Cluster) -> None:
    done = list(executor_of(count=2).map_unordered(work, ITEMS, lambda: True))
    assert sorted(done) == [(item, f"{item} done") for item in ITEMS[:2]]
    assert cluster.at_work == []


def test_an_item_is_done_even_if_the_time_was_over_before_and_its_worker_dies(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()] if number == 0 else [TaskDone(f"{item} done", 2.0)]
    done = list(executor_of(count=1).map_unordered(work, ITEMS, lambda: True))
    assert done == [(ITEMS[0], f"{ITEMS[0]} done")]


def test_an_item_whose_worker_hangs_is_done_by_another(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [SILENCE] if number == 0 else [TaskDone(f"{item} done", 2.0)]
    done = list(executor_of(count=2, stall_s=30.0).map_unordered(work, ITEMS))
    assert sorted(done) == [(item, f"{item} done") for item in ITEMS]
    assert cluster.actors[0].is_killed


def test_an_item_on_which_all_workers_die_ends_the_run_and_all_tasks(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()] if item == ITEMS[0] else [SILENCE]
    with pytest.raises(JobError, match="is given up: 3 workers died in a row"):
        list(executor_of(count=2, attempts=3).map_unordered(work, ITEMS))
    assert Counter(item for _, item in cluster.begun)[ITEMS[0]] == 3
    assert cluster.at_work == []


def test_an_error_of_the_task_ends_the_run_and_all_tasks(cluster: Cluster) -> None:
    error = ConfigError("data", "x", "y")
    cluster.on_run = lambda number, item: [raised(error)] if item == ITEMS[1] else [SILENCE]
    with pytest.raises(ConfigError) as caught:
        list(executor_of(count=3).map_unordered(work, ITEMS))
    assert caught.value is error
    assert cluster.at_work == []
    assert Counter(item for _, item in cluster.begun)[ITEMS[1]] == 1


def test_a_driver_that_stops_ends_all_tasks(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [TaskDone(None, 1.0)] if item == ITEMS[0] else [SILENCE]
    executor = executor_of(count=2)
    each = executor.map_unordered(work, ITEMS)
    assert isinstance(each, Iterator)
    assert next(each) == (ITEMS[0], None)
    assert cluster.at_work == [1]
    each.close()  # type: ignore[attr-defined]
    assert cluster.at_work == []


def test_the_model_is_that_of_the_first_worker(cluster: Cluster) -> None:
    executor = executor_of(count=2)
    assert executor.model_name == "demo"
    assert executor.model_info == ready().model_info
    assert len(cluster.actors) == 2


def test_an_executor_that_ends_stops_its_workers(cluster: Cluster) -> None:
    with executor_of(count=2) as executor:
        executor.start_workers()
        assert cluster.alive == [0, 1]
    assert cluster.alive == []


def test_one_item_runs_on_one_worker_and_its_events_are_shown(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [
        StageStarted("train", 5, "step"),
        StageUpdated(5, {"loss": 0.5}),
        TaskDone("result", 3.0),
    ]
    log = ProgressLog()
    executor = executor_of(count=2)
    assert executor.run(work, "item", log) == "result"
    assert log.lines == ["begin train 5 step", "update 5 {'loss': 0.5}", "end train"]
    assert len(cluster.begun) == 1
    assert [each.busy_s for each in executor.worker_times()] == [3.0, 0.0]


def test_one_item_whose_worker_dies_is_begun_again_by_another_and_its_stage_as_well(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: (
        [StageStarted("train", 5, "step"), died()]
        if number == 0
        else [StageStarted("train", 5, "step", 3), TaskDone("result", 3.0)]
    )
    log = ProgressLog()
    assert executor_of().run(work, "item", log) == "result"
    assert log.lines == ["begin train 5 step", "end train", "begin train 5 step, 3 done", "end train"]
    assert cluster.begun == [(0, "item"), (1, "item")]


def test_the_death_of_one_who_is_not_at_it_is_no_reason_to_begin_again(cluster: Cluster) -> None:
    cluster.on_load = lambda number: died() if number == 1 else ready()
    cluster.on_run = lambda number, item: [StageUpdated(1)] * 5 + [TaskDone("result", 3.0)]
    executor = executor_of(count=2)
    assert executor.run(work, "item", Notes()) == "result"
    assert len(cluster.begun) == 1


def test_one_who_is_lost_as_another_finishes_is_replaced_all_the_same(cluster: Cluster) -> None:
    """Both events arrive at once, and the driver continues with the result."""
    cluster.on_load = lambda number: died() if number in (1, 2) else ready()
    executor = executor_of(count=2, start_s=100.0)
    assert executor.run(work, "one", Notes()) == "one done"
    assert cluster.alive == [0]
    cluster.now += 101.0
    cluster.on_run = lambda number, item: [StageUpdated(1), StageUpdated(1), TaskDone("result", 1.0)]
    assert executor.run(work, "two", Notes()) == "result"
    assert cluster.alive == [0, 3]


def test_one_item_on_which_all_workers_die_ends_the_run(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()]
    with pytest.raises(JobError, match="dict is given up: 2 workers died in a row"):
        executor_of(attempts=2).run(work, {}, Notes())
    assert len(cluster.begun) == 2


def test_an_interrupted_item_ends_its_task(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [StageStarted("train", 5, "step"), SILENCE]

    class Interrupting(Notes):
        def stage(self, *args: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor_of().run(work, "item", Interrupting())
    assert cluster.at_work == []


def test_one_who_trains_alone_is_a_worker_of_the_pool(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "train_together", lambda *args: pytest.fail("there is but one"))
    assert executor_of().train(work, "item", Notes()) == "item done"


def test_training_processes_use_the_resources_of_the_pool_and_their_times_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_together(job: Any, task_: Any, item: Any, progress: Any) -> training.Trained:
        assert cluster.alive == [], "training needs their resources"
        assert (job.train_workers, task_, item) == (2, work, "item")
        return training.Trained("result", [TrainerDone(1, "10.0.0.1", 5.0), TrainerDone(2, "10.0.0.2", 6.0)], 3)

    monkeypatch.setattr(training, "train_together", train_together)
    executor = executor_of(train_workers=2)
    list(executor.map_unordered(work, ITEMS[:2]))
    assert executor.train(work, "item", Notes()) == "result"
    of_training = [WorkerTime("trainer 1", "node 1", 1, 5.0, 3), WorkerTime("trainer 2", "node 2", 1, 6.0, 3)]
    assert executor.worker_times() == [WorkerTime("worker 1", "node 1", 2, 4.0, 0), *of_training]
    assert executor.run(work, "next", Notes()) == "next done", "the pool starts again"
    assert executor.worker_times() == [WorkerTime("worker 1", "node 1", 3, 6.0, 0), *of_training]
