"""Workers and drivers that are killed or hang: the job goes on, and its artefact is the one it would have been."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.job.cluster import TRAINER, WORKER, Driver, Ended
from tests.job.runs import Bench, Job, check_agree, pieces

pytestmark = pytest.mark.serve

STAGES: dict[str, tuple[str, Callable[[Job], bool]]] = {
    "prompts": ("dataset: ", lambda job: len(job.shards("prompts")) >= 2),
    "collect": ("shortlist: ", lambda job: len(job.shards("shards")) >= 3),
    "train": ("train: 40/40 step", lambda job: "collect" in job.ledger["stages"]),
    "risk": ("trace calibration: ", lambda job: "train" in job.ledger["stages"]),
    "publish": ("publish: ", lambda job: "risk" in job.ledger["stages"]),
    "measure": ("measure: ", lambda job: "publish" in job.ledger["stages"]),
}
"""What the job says at the end of each stage, and whether it is well in it."""


def strike(bench: Bench, driver: Driver, ready: Callable[[], bool], title: str = WORKER) -> None:
    """Kill somebody who is at work, once the job is so far."""
    found: list[psutil.Process] = []

    def at_work() -> bool:
        found[:] = bench.cluster.processes(title) if ready() else []
        return bool(found)

    driver.until(at_work)
    found[-1].kill()
    driver.until(lambda: not found[-1].is_running() or found[-1].status() == psutil.STATUS_ZOMBIE)


def check_whole(job: Job, ended: Ended, reference: Job) -> None:
    """Nothing is missing, nothing is there twice, and everything is as without a fault."""
    assert ended.code == 0, ended.err
    assert job.artefact.digest == reference.artefact.digest
    assert job.ledger["shards"] == reference.ledger["shards"]
    assert job.contents("shards") == reference.contents("shards")
    assert set(pieces(ended.err).values()) <= {1}, "a piece that was finished is not done again"


@pytest.fixture(scope="module")
def battered(bench: Bench) -> tuple[Job, Ended]:
    """A job of one worker, which is killed in every stage."""
    job = bench.job(measure=True)
    driver = bench.start(job)
    for number, (_, is_well_in) in enumerate(STAGES.values()):
        driver.until(lambda: driver.err.count("is lost") == number)  # noqa: B023
        strike(bench, driver, lambda: is_well_in(job))  # noqa: B023
        before = job.stamps()
    ended = driver.end()
    assert before.items() <= job.stamps().items()
    return job, ended


def test_a_worker_killed_in_every_stage_costs_at_most_what_it_was_at(
    battered: tuple[Job, Ended], reference: Job
) -> None:
    job, ended = battered
    check_whole(job, ended, reference)
    deaths = [found.start() for found in re.finditer("is lost", ended.err)]
    ends = [ended.err.index(f"tide: {said}") for said, _ in STAGES.values()]
    assert sorted(deaths + ends) == [place for pair in zip(deaths, ends, strict=True) for place in pair]
    assert "6 restarts" in ended.out
    assert "not measured" not in ended.out
    assert job.ledger["stages"]["measure"]["info"]["speedups"]


def test_another_number_of_workers_makes_the_same_files(battered: tuple[Job, Ended], reference: Job) -> None:
    job, _ = battered
    assert (job.settings["workers"]["count"], reference.settings["workers"]["count"]) == (1, 2)
    for folder in ("prompts", "dataset", "shards", "train", "risk"):
        assert job.contents(folder) == reference.contents(folder) != {}


def states_until_trained(job: Job, driver: Driver) -> set[tuple[int, int] | None]:
    """Every saved state that is seen until the training is done."""
    seen = set()

    def is_trained() -> bool:
        seen.add(job.state)
        return "train" in job.ledger["stages"]

    driver.until(is_trained)
    return seen


def test_a_training_goes_on_from_its_last_state_whoever_is_killed(bench: Bench, trained: Job) -> None:
    job = bench.again(trained, since="train")
    driver = bench.start(job)
    driver.until(lambda: job.state is not None)
    driver.kill()
    state = job.state
    assert "train" not in job.ledger["stages"]
    driver = bench.start(job)
    strike(bench, driver, lambda: "tide: collect: done before" in driver.err)
    assert len(states_until_trained(job, driver) - {state, None}) <= 1, "it is not made again, and the next is the last"
    ended = driver.end()
    assert job.state is None, "it is not needed in the end"
    check_whole(job, ended, trained)
    assert ended.err.count("is lost") == 1


@pytest.fixture(scope="module")
def together(bench: Bench, trained: Job) -> tuple[Job, Ended]:
    """A job in which two train together, one of whom is killed when they have saved a state."""
    job = bench.again(trained, since="train", train_workers=2)
    driver = bench.start(job)
    strike(bench, driver, lambda: job.state is not None, TRAINER)
    state = job.state
    assert state is not None
    assert len(states_until_trained(job, driver) - {state, None}) <= 1, "it is not made again, and the next is the last"
    return job, driver.end()


def test_several_that_train_together_go_on_when_one_is_killed(together: tuple[Job, Ended], trained: Job) -> None:
    job, ended = together
    assert ended.code == 0, ended.err
    assert job.ledger["shards"] == trained.ledger["shards"]
    assert job.stamps().keys() == trained.stamps().keys()
    assert job.state is None
    assert not (job.run / "ray").exists()
    assert re.findall(r"^(trainer \d) on node 1: 1 pieces in [\d.]+ s, 1 restarts$", ended.out, re.M) == [
        "trainer 1",
        "trainer 2",
    ]


def test_several_that_train_together_find_what_one_alone_does_but_for_chance(
    together: tuple[Job, Ended], trained: Job
) -> None:
    job, _ = together
    assert job.artefact.digest != trained.artefact.digest, "sums are rounded in another order"
    check_agree(job.artefact.manifest, trained.artefact.manifest)


def test_the_death_of_one_of_several_that_train_together_is_told(together: tuple[Job, Ended]) -> None:
    _, ended = together
    assert "restart" in ended.out + ended.err


def test_a_job_whose_driver_is_killed_goes_on_when_it_is_submitted_again(bench: Bench, reference: Job) -> None:
    job = bench.again(reference, since="collect", workers={"count": 2})
    driver = bench.start(job)
    driver.until(lambda: len(job.shards("shards")) >= 3)
    driver.kill()
    collected = job.stamps()
    assert 3 <= len(job.shards("shards")) < len(reference.shards("shards"))
    ended = bench.run(job)
    check_whole(job, ended, reference)
    assert collected.items() <= job.stamps().items(), "finished shards are not written again"
    assert pieces(ended.err).keys() == set(reference.shards("shards")) - collected.keys()
    did = [int(num) for num in re.findall(r"^worker \d on node 1: (\d+) pieces", ended.out, re.M)]
    assert sum(did) >= len(reference.shards("shards")) + 3, "those of the first driver count, and the later stages"


def test_a_worker_that_hangs_is_killed_and_another_does_its_work(bench: Bench, reference: Job) -> None:
    job = bench.again(reference, since="collect", workers={"count": 2, "stall_s": 10.0})
    driver = bench.start(job)
    driver.until(lambda: len(job.shards("shards")) >= 3)
    [hung, *_] = bench.cluster.processes(WORKER)
    hung.send_signal(signal.SIGSTOP)
    ended = driver.end()
    check_whole(job, ended, reference)
    assert len(re.findall(r"worker \d is killed: nothing was heard of it", ended.err)) == 1
    assert "is lost" not in ended.err
    deadline = time.monotonic() + 20
    while hung.is_running() and hung.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)
