"""The pool: lost workers are replaced, and no task is lost or given up too soon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from deploy.calibration.events import Note, TaskDone
from deploy.calibration.pool import CLOSE_S, NOTE_WAITING_S, JobError, Pool, WorkerSlot, name_of
from tests.deploy.calibration.fake_cluster import SILENCE, Cluster, Notes, died, raised, ready, settings
from tide_core.calibration.ledger import WorkerTime
from tide_core.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    path: str


ONE, TWO = Piece("shards/train-00001"), Piece("shards/train-00002")


def pool_of(notes: Notes | None = None, **workers: Any) -> Pool:
    """With all workers ready that can be."""
    pool = Pool(settings(**workers), notes or Notes())
    pool.wait_ready()
    return pool


def start(pool: Pool, *items: Any) -> list[WorkerSlot]:
    slots = pool.idle()[: len(items)]
    for slot, item in zip(slots, items, strict=True):
        pool.submit(slot, None, item)
    return slots


def listen(pool: Pool, until: Any, most: int = 1000) -> list[Any]:
    """The items that were lost by then."""
    lost = []
    for _ in range(most):
        if until():
            return lost
        pool.poll()
        lost += pool.replace_lost()
    pytest.fail("it never happens")


def test_a_worker_that_dies_is_replaced_in_its_place_and_its_item_is_given_back_once(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()] if number == 0 else [SILENCE]
    notes = Notes()
    pool = pool_of(notes, count=2)
    start(pool, ONE, TWO)
    pool.poll()
    assert pool.replace_lost() == [ONE]
    assert pool.replace_lost() == []
    assert cluster.actors[0].is_killed, "what is left of it goes"
    assert cluster.alive == [1, 2]
    assert [line.startswith("worker 1 is lost: ActorDiedError") for line in notes.lines] == [True]
    listen(pool, pool.idle)
    assert [(slot.number, slot.item, slot.num_restarts) for slot in pool.idle()] == [(1, None, 1)]
    assert pool.num_restarts == 1


def test_two_that_die_at_once_are_both_replaced_and_both_items_given_back(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()]
    pool = pool_of(count=2)
    start(pool, ONE, TWO)
    pool.poll()
    assert sorted(pool.replace_lost(), key=name_of) == [ONE, TWO]
    assert cluster.alive == [2, 3]


def test_one_that_is_silent_for_too_long_at_its_work_is_killed_and_not_before(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [SILENCE]
    notes = Notes()
    pool = pool_of(notes, count=2, stall_s=30.0)
    start(pool, ONE)
    begun = cluster.now
    assert listen(pool, lambda: cluster.actors[0].is_killed) == [ONE]
    assert 30.0 < cluster.now - begun <= 32.0
    assert cluster.alive == [1, 2], "one that has no work may be silent"
    assert [line.split(" for ")[0] for line in notes.lines] == ["worker 1 is killed: no event from it"]


def test_a_worker_that_sends_events_is_not_killed_however_long_its_task_takes(cluster: Cluster) -> None:
    """The time since the last event counts, not the whole duration."""
    cluster.on_run = lambda number, item: [Note("still here")] * 10 + [TaskDone("result", 200.0)]
    pool = pool_of(stall_s=30.0)
    start(pool, ONE)
    events: list[Any] = []
    while not any(isinstance(event, TaskDone) for event in events):
        cluster.now += 20.0
        events += [event for _, event in pool.poll()]
        assert pool.replace_lost() == []
    assert len(events) == 11


def test_work_begins_to_be_silent_when_it_begins(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [SILENCE]
    pool = pool_of(stall_s=30.0)
    cluster.now += 1000.0  # nothing was to be done for so long
    start(pool, ONE)
    pool.poll()
    assert pool.replace_lost() == []


@pytest.mark.parametrize("attempts", [1, 3])
def test_so_many_deaths_on_one_item_end_the_run_naming_it(cluster: Cluster, attempts: int) -> None:
    cluster.on_run = lambda number, item: [died()] if item is ONE else [SILENCE]
    pool = pool_of(count=2, attempts=attempts)
    start(pool, TWO)
    for _ in range(attempts - 1):
        start(pool, ONE)
        assert listen(pool, lambda: len(pool.idle()) == 1) == [ONE]
    start(pool, ONE)
    pool.poll()
    with pytest.raises(JobError, match=rf"shards/train-00001 is given up: {attempts} workers died in a row"):
        pool.replace_lost()


def test_deaths_on_different_items_are_not_added_up_and_those_on_a_finished_one_are_forgotten(cluster: Cluster) -> None:
    doomed = [True]
    cluster.on_run = lambda number, item: [died()] if doomed[0] else [TaskDone(None, 1.0)]
    pool = pool_of(attempts=2)
    for item in (ONE, TWO):
        doomed[0] = True
        start(pool, item)
        assert listen(pool, pool.idle) == [item]
        doomed[0] = False
        [slot] = start(pool, item)
        [(_, event)] = pool.poll()
        assert isinstance(event, TaskDone)
        assert pool.finish(slot, event) is item
    doomed[0] = True
    start(pool, ONE)
    assert listen(pool, pool.idle) == [ONE], "the death before it was finished does not count"


def test_workers_that_die_before_they_have_their_model_end_the_run_if_none_ever_has_it(cluster: Cluster) -> None:
    cluster.on_load = lambda number: died()
    with pytest.raises(JobError, match="a worker could not be started: 3 workers died in a row"):
        pool_of(attempts=3)
    assert len(cluster.actors) == 4


def test_workers_that_die_before_they_have_their_model_are_forgotten_when_one_has_it(cluster: Cluster) -> None:
    cluster.on_load = lambda number: ready() if number % 2 else died()
    pool = pool_of(attempts=2)
    cluster.on_run = lambda number, item: [died()]
    start(pool, ONE)
    assert listen(pool, pool.idle) == [ONE]
    assert pool.num_restarts == 3


@pytest.mark.parametrize("error", [ConfigError("data", "x", "y"), OSError(28, "No space left on device")], ids=repr)
@pytest.mark.parametrize("where", ["load", "run"])
def test_what_the_work_itself_raises_is_raised_as_it_is_and_not_tried_again(
    cluster: Cluster, error: Exception, where: str
) -> None:
    pool = Pool(settings(), Notes())
    if where == "load":
        cluster.on_load = lambda number: raised(error)
        pool.start_workers()
    else:
        cluster.on_run = lambda number, item: [Note("so far"), raised(error)]
        pool.wait_ready()
        start(pool, ONE)
    with pytest.raises(type(error)) as caught:
        listen(pool, lambda: False, most=3)
    assert caught.value is error
    assert len(cluster.actors) == 1


def test_an_unexpected_error_becomes_one_line_and_is_not_retried(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [raised(RuntimeError("out of\nmemory"))]
    pool = pool_of()
    start(pool, ONE)
    with pytest.raises(JobError, match="RuntimeError: out of memory"):
        pool.poll()


def test_two_models_that_differ_are_refused_naming_both_nodes(cluster: Cluster) -> None:
    cluster.on_load = lambda number: ready(f"10.0.0.{number + 1}", tokenizer=f"0{number}")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 has another than 10\.0\.0\.1"):
        pool_of(count=2)


def test_a_model_that_changes_while_a_job_runs_is_refused(cluster: Cluster) -> None:
    cluster.on_load = lambda number: ready(tokenizer=f"0{number}")
    cluster.on_run = lambda number, item: [died()]
    pool = pool_of()
    start(pool, ONE)
    with pytest.raises(ConfigError, match="the same model on every node"):
        listen(pool, pool.idle)


def test_the_error_after_waiting_too_long_names_the_resources(cluster: Cluster) -> None:
    cluster.on_load = lambda number: SILENCE
    notes, begun = Notes(), cluster.now
    with pytest.raises(JobError, match=r"no worker was placed and had its model after 10\d s") as caught:
        pool_of(notes, count=2, start_s=100.0, num_cpus=2.0)
    expected = "each asks for 2 CPUs and 0 GPUs, the cluster has {'CPU': 4.0}, of which {'CPU': 0.5} are free"
    assert str(caught.value).endswith(expected)
    assert 100.0 < cluster.now - begun <= 102.0
    assert notes.lines == [f"waiting for a worker; {expected}"], "once, and well before the end"


def test_waiting_is_noted_before_the_time_is_over(cluster: Cluster) -> None:
    cluster.on_load = lambda number: SILENCE
    notes = Notes()
    pool, begun = Pool(settings(), notes), cluster.now
    pool.start_workers()
    while not notes.lines:
        pool.poll()
    assert NOTE_WAITING_S < cluster.now - begun <= NOTE_WAITING_S + 2


def test_the_time_to_start_begins_when_workers_are_started(cluster: Cluster) -> None:
    cluster.on_load = lambda number: SILENCE
    pool = Pool(settings(start_s=100.0), Notes())
    cluster.now += 1000.0  # the driver had other things to do
    pool.start_workers()
    pool.poll()
    cluster.actors[0].loading.answer(ready())
    assert pool.wait_ready().model_name == "demo"


def test_one_that_gets_no_place_is_started_again_while_others_work(cluster: Cluster) -> None:
    cluster.on_load = lambda number: SILENCE if number == 1 else ready()
    cluster.on_run = lambda number, item: [SILENCE]
    notes = Notes()
    pool = pool_of(notes, count=2, start_s=100.0, stall_s=10_000.0)
    start(pool, ONE)
    begun = cluster.now
    assert listen(pool, pool.idle) == []
    assert 100.0 < cluster.now - begun <= 103.0
    assert notes.lines == ["worker 2 is not placed or has no model after 100 s; again"]
    assert cluster.alive == [0, 2]
    assert [slot.number for slot in pool.idle()] == [2]


def test_a_worker_that_was_ready_in_time_is_not_restarted_after_a_late_poll(cluster: Cluster) -> None:
    cluster.on_load = lambda number: SILENCE if number == 1 else ready()
    notes = Notes()
    pool = pool_of(notes, count=2, start_s=100.0)
    cluster.actors[1].loading.answer(ready())
    cluster.now += 1000.0  # the driver read a data set
    pool.poll()
    assert pool.replace_lost() == []
    assert notes.lines == []
    assert [slot.number for slot in pool.idle()] == [1, 2]


def test_one_that_was_lost_in_a_place_that_was_given_back_is_no_trouble_later(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [died()]
    pool = pool_of()
    start(pool, ONE)
    pool.poll()
    pool.cancel()
    assert pool.replace_lost() == [], "its task was cancelled"
    assert cluster.alive == [1]
    assert listen(pool, pool.idle) == []
    start(pool, TWO)
    pool.poll()
    pool.stop_workers()
    pool.start_workers()
    assert pool.replace_lost() == []
    assert len(cluster.alive) == 1


def test_cancelled_tasks_end_and_idle_workers_stay(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [SILENCE]
    pool = pool_of(count=3)
    start(pool, ONE, TWO)
    assert cluster.at_work == [0, 1]
    pool.cancel()
    assert cluster.at_work == []
    assert cluster.alive == [2, 3, 4]
    listen(pool, lambda: len(pool.idle()) == 3)
    assert [slot.number for slot in pool.idle()] == [1, 2, 3]


def test_places_that_are_given_back_are_closed_and_killed(cluster: Cluster) -> None:
    cluster.on_run = lambda number, item: [SILENCE]
    pool = pool_of(count=2)
    start(pool, ONE)
    pool.stop_workers()
    assert [actor.is_closed for actor in cluster.actors] == [False, True], "one that is at work could not answer"
    assert [actor.is_killed for actor in cluster.actors] == [True, True]


@pytest.mark.parametrize("answer", [SILENCE, died()], ids=["silence", "death"])
def test_one_that_does_not_close_is_killed_all_the_same(cluster: Cluster, answer: Any) -> None:
    cluster.on_close = answer
    pool = pool_of(count=2)
    begun = cluster.now
    pool.stop_workers()
    assert [actor.is_killed for actor in cluster.actors] == [True, True]
    assert cluster.now - begun <= CLOSE_S


def test_times_add_up_over_deaths_and_over_places_that_were_given_back(cluster: Cluster) -> None:
    cluster.on_load = lambda number: ready(f"10.0.0.{number}")
    cluster.on_run = lambda number, item: [died()] if number == 1 else [TaskDone(None, 2.5)]
    pool = pool_of(count=2)
    [first, second] = start(pool, ONE, TWO)
    [(slot, event)] = pool.poll()
    assert slot is first
    pool.finish(slot, event)  # type: ignore[arg-type]
    assert second.item is TWO
    assert pool.replace_lost() == [TWO]
    before = pool.worker_times()
    assert before == [WorkerTime("worker 1", "node 1", 1, 2.5, 0), WorkerTime("worker 2", "not placed", 0, 0.0, 1)]
    pool.stop_workers()
    assert pool.worker_times() == before
    assert pool.num_restarts == 1
    pool.stop_workers()
    assert pool.worker_times() == before, "a second stop changes nothing"
    pool.start_workers()
    listen(pool, lambda: len(pool.idle()) == 2)
    for slot in start(pool, ONE, TWO):
        pool.finish(slot, TaskDone(None, 1.0))
    assert pool.worker_times() == [
        WorkerTime("worker 1", "node 3", 2, 3.5, 0),
        WorkerTime("worker 2", "node 4", 1, 1.0, 1),
    ]


def test_starting_twice_starts_every_worker_once(cluster: Cluster) -> None:
    pool = Pool(settings(count=2), Notes())
    pool.start_workers()
    pool.start_workers()
    assert len(cluster.actors) == 2


def test_a_worker_has_the_resources_of_the_settings_and_ray_does_not_restart_it(cluster: Cluster) -> None:
    pool_of(num_cpus=2.0, num_gpus=1.0, threads=3)
    [options] = cluster.options
    env = {"env_vars": {"OMP_NUM_THREADS": "3"}}
    assert options == {"num_cpus": 2.0, "num_gpus": 1.0, "max_restarts": 0, "runtime_env": env}


def test_items_have_names() -> None:
    class Named:
        name = "prompts/0-00001.jsonl"

    assert [name_of(item) for item in (ONE, Named(), {})] == [ONE.path, Named.name, "dict"]
