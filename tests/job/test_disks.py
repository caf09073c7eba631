"""Disks that fail under a job: it ends with a reason, leaves nothing half done, and goes on when they are well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.calibration.tiny_runs import contents
from tests.evaluation.on_disk import save_artefact_for_it
from tests.job.cluster import Ended
from tests.job.disks import full, read_only, small_disk
from tests.job.runs import Bench, Job

pytestmark = pytest.mark.serve

DISK_BYTES = 16 * 2**20
FAULTS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "No space left on device": full,
    "Read-only file system": read_only,
}
ONE = {"count": 1}


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """One for each fault, well so far."""
    with contextlib.ExitStack() as stack:
        yield {
            words: stack.enter_context(small_disk(tmp_path / f"disk-{number}", DISK_BYTES))
            for number, words in enumerate(FAULTS)
        }


def check_failed(ended: Ended, words: str) -> None:
    assert ended.code in (1, 2), ended.err
    assert ended.reason.startswith("tide: error: ")
    assert words in ended.reason
    assert "Traceback" not in ended.err
    assert "artefact: " not in ended.out


def test_a_disk_that_fails_while_shards_are_made_ends_the_job_and_costs_no_finished_shard(
    bench: Bench, reference: Job, disks: dict[str, Path]
) -> None:
    jobs = {
        words: bench.again(reference, since="collect", storage=str(disk), workers=ONE) for words, disk in disks.items()
    }
    drivers = {words: bench.start(job) for words, job in jobs.items()}
    with contextlib.ExitStack() as faults:
        for words, driver in drivers.items():
            driver.until(lambda: len(jobs[words].shards("shards")) >= 3)  # noqa: B023
            faults.enter_context(FAULTS[words](disks[words]))
        for words, driver in drivers.items():
            check_failed(driver.end(), words)
        before = {words: job.stamps() for words, job in jobs.items()}
        for job in jobs.values():
            noted, written = job.shards("shards"), job.contents("shards")
            assert 3 <= len(noted) < len(reference.shards("shards"))
            assert set(noted) <= written.keys()
            assert written.items() <= reference.contents("shards").items(), "what has its name is whole"
            assert not job.output.exists()
    drivers = {words: bench.start(job) for words, job in jobs.items()}
    for words, driver in drivers.items():
        assert driver.end().code == 0
        assert before[words].items() <= jobs[words].stamps().items()
        assert jobs[words].artefact.digest == reference.artefact.digest


def test_a_disk_that_fails_at_publication_keeps_the_artefact_that_was_there(
    bench: Bench, reference: Job, disks: dict[str, Path]
) -> None:
    older = {words: save_artefact_for_it(disk / "artefact") for words, disk in disks.items()}
    before = {words: contents(artefact) for words, artefact in older.items()}
    with contextlib.ExitStack() as faults:
        drivers = {}
        for words, disk in disks.items():
            settings = {"output": str(older[words]), "force": True, "workers": ONE}
            drivers[words] = bench.start(bench.again(reference, since="publish", **settings))
            faults.enter_context(FAULTS[words](disk))
        for words, driver in drivers.items():
            check_failed(driver.end(), words)
            assert contents(older[words]) == before[words]
            assert {path.name for path in disks[words].iterdir()} <= {"artefact", "ballast"}, "no leftovers"


def test_a_storage_that_is_full_at_publication_keeps_the_artefact_that_was_there(
    bench: Bench, reference: Job, tmp_path: Path
) -> None:
    older = save_artefact_for_it(tmp_path / "artefact")
    before = contents(older)
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        settings = {"storage": str(disk), "output": str(older), "force": True, "workers": ONE}
        job = bench.again(reference, since="publish", **settings)
        driver = bench.start(job)
        driver.until(lambda: "tide: risk: done before" in driver.err)
        with full(disk):
            check_failed(driver.end(), "No space left on device")
        assert contents(older) == before
        assert not (job.run / "artefact").exists()
