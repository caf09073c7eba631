"""Workers and drivers that are killed or hang: the job goes on, and its artefact is the one it would have been.

Whoever is killed here waits at a gate: the job is where the test wants it, and cannot end before."""

from __future__ import annotations

import contextlib
import re

import psutil
import pytest

from tests.job.cluster import Driver, Ended, until_gone
from tests.job.gates import Gate
from tests.job.runs import STATE, Bench, Job, check_agree, pieces

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

STAGES = {
    "prompts/0-00001.jsonl": "dataset: ",
    "shards/train-00003.safetensors": "shortlist: ",
    STATE: "train: 40/40 step",
    "risk/calibration.msgpack": "trace calibration: ",
    "train_fast": "fast: 2/2 step",
    "write_artefact": "publish: ",
    "measure": "measure: ",
}
"""A gate in each stage, before a piece of work or after a state of the training; what the job logs at its end."""
FOURTH_SHARD = "shards/train-00003.safetensors"


def kill_at(gate: Gate, driver: Driver) -> None:
    """Kill who waits at a gate, and open it for whoever does the work again."""
    process = driver.until_waiting(gate)
    process.kill()
    until_gone(process)
    gate.open()


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
    gates = [bench.gate(job, name) for name in STAGES]
    driver = bench.start(job, gates=True)
    before: dict[str, tuple[int, int]] = {}
    for gate in gates:
        driver.until_waiting(gate)
        assert before.items() <= job.stamps().items()
        before = job.stamps()
        kill_at(gate, driver)
    ended = driver.end()
    assert before.items() <= job.stamps().items()
    assert bench.num_states(job) == 2, "the first is not made again, and the second is the last"
    return job, ended


def test_a_worker_killed_in_every_stage_costs_at_most_what_it_was_at(
    battered: tuple[Job, Ended], reference: Job
) -> None:
    job, ended = battered
    check_whole(job, ended, reference)
    deaths = [found.start() for found in re.finditer("is lost", ended.err)]
    ends = [ended.err.index(f"tide: {line}") for line in STAGES.values()]
    assert sorted(deaths + ends) == [place for pair in zip(deaths, ends, strict=True) for place in pair]
    assert "7 restarts" in ended.out
    assert "not measured" not in ended.out
    assert job.ledger["stages"]["measure"]["info"]["speedups"]


def test_another_number_of_workers_makes_the_same_files(battered: tuple[Job, Ended], reference: Job) -> None:
    job, _ = battered
    assert (job.settings["workers"]["count"], reference.settings["workers"]["count"]) == (1, 2)
    for folder in ("prompts", "dataset", "shards", "train", "risk"):
        assert job.contents(folder) == reference.contents(folder) != {}


@pytest.fixture(scope="module")
def together(bench: Bench, reference: Job) -> tuple[Job, Ended]:
    """A job in which two train together, one of whom is killed when they have saved a state."""
    job = bench.again(reference, since="train", train_workers=2, workers={"count": 1})
    gate = bench.gate(job, STATE)
    driver = bench.start(job, gates=True)
    kill_at(gate, driver)
    ended = driver.end()
    assert bench.num_states(job) == 2, "the first is not made again, and the second is the last"
    return job, ended


def test_several_that_train_together_go_on_when_one_is_killed(together: tuple[Job, Ended], reference: Job) -> None:
    job, ended = together
    assert ended.code == 0, ended.err
    assert job.ledger["shards"] == reference.ledger["shards"]
    assert job.stamps().keys() == reference.stamps().keys()
    assert not job.has_state
    assert not (job.run / "ray").exists()
    assert re.findall(r"^(trainer \d) on node 1: 1 pieces in [\d.]+ s, 1 restarts$", ended.out, re.M) == [
        "trainer 1",
        "trainer 2",
    ]


def test_several_that_train_together_find_what_one_alone_does_but_for_chance(
    together: tuple[Job, Ended], reference: Job
) -> None:
    job, _ = together
    assert job.artefact.digest != reference.artefact.digest, "sums are rounded in another order"
    check_agree(job.artefact.manifest, reference.artefact.manifest)


def test_the_death_of_one_of_several_that_train_together_is_logged(together: tuple[Job, Ended]) -> None:
    _, ended = together
    assert "restart" in ended.out + ended.err


def kill_driver_at(gate: Gate, driver: Driver) -> None:
    """Its worker waits at a gate and ends with it."""
    worker = driver.until_waiting(gate)
    driver.kill()
    until_gone(worker)
    gate.open()


def test_a_job_whose_driver_is_killed_goes_on_when_it_is_submitted_again(bench: Bench, reference: Job) -> None:
    """Twice: while shards are made, and in a training that has saved a state."""
    job = bench.again(reference, since="collect", workers={"count": 1})
    at_shard, at_state = bench.gate(job, FOURTH_SHARD), bench.gate(job, STATE)
    kill_driver_at(at_shard, bench.start(job, gates=True))
    collected = job.stamps()
    assert len(job.shards("shards")) == 3
    second = bench.start(job, gates=True)
    kill_driver_at(at_state, second)
    assert pieces(second.err).keys() == set(reference.shards("shards")) - collected.keys()
    assert job.has_state
    assert "train" not in job.ledger["stages"]
    driver = bench.start(job, gates=True)
    ended = driver.end()
    check_whole(job, ended, reference)
    assert collected.items() <= job.stamps().items(), "finished shards are not written again"
    assert not pieces(ended.err)
    assert bench.num_states(job) == 2, "the first is not made again, and the second is the last"
    assert not job.has_state, "it is not needed in the end"
    did = [int(num) for num in re.findall(r"^worker \d on node 1: (\d+) pieces", ended.out, re.M)]
    assert sum(did) >= len(reference.shards("shards")) + 3, "those of the first drivers count, and the later stages"


def test_a_worker_that_hangs_is_killed_and_another_does_its_work(bench: Bench, reference: Job) -> None:
    # On a busy machine a worker that works may be silent for so long too: it is replaced like the one that hangs.
    job = bench.again(reference, since="risk", workers={"count": 1, "stall_s": 20.0, "attempts": 100})
    gate = bench.gate(job, "risk/calibration.msgpack", stops=True)
    driver = bench.start(job, gates=True)
    ended = driver.end()
    check_whole(job, ended, reference)
    assert re.search(r"worker \d is killed: ", ended.err)
    assert "is lost" not in ended.err
    [hung] = gate.waiting
    with contextlib.suppress(psutil.NoSuchProcess):
        until_gone(psutil.Process(hung))
