"""Disks that fail under a job: it ends with a reason, leaves nothing half done, and goes on when they are well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.calibration.tiny_runs import contents
from tests.evaluation.on_disk import save_artefact_for_it
from tests.job.cluster import Ended
from tests.job.disks import full, read_only, small_disk
from tests.job.runs import Bench, Job

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

DISK_BYTES = 16 * 2**20
FULL, READ_ONLY = "No space left on device", "Read-only file system"
ONE = {"count": 1}


def check_failed(ended: Ended, message: str) -> None:
    assert ended.code in (1, 2), ended.err
    assert ended.reason.startswith("tide: error: ")
    assert message in ended.reason
    assert "Traceback" not in ended.err
    assert "artefact: " not in ended.out


def test_a_disk_that_fails_while_shards_are_made_ends_the_job_and_costs_no_finished_shard(
    bench: Bench, reference: Job, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        job = bench.again(reference, since="collect", storage=str(disk), workers=ONE)
        gate = bench.gate(job, "shards/train-00003.safetensors")
        driver = bench.start(job, gates=True)
        driver.until_waiting(gate)
        with full(disk):
            gate.open()
            check_failed(driver.end(), FULL)
            before, noted, written = job.stamps(), job.shards("shards"), job.contents("shards")
            assert len(noted) == 3
            assert set(noted) <= written.keys()
            assert written.items() <= reference.contents("shards").items(), "what has its name is whole"
            assert not job.output.exists()
        bench.done(job)
        assert before.items() <= job.stamps().items()
        assert job.artefact.digest == reference.artefact.digest


def test_a_disk_that_fails_at_publication_keeps_the_artefact_that_was_there(
    bench: Bench, reference: Job, tmp_path: Path
) -> None:
    """One is the disk of the artefact and cannot be written any more, the other that of the run and has no space."""
    disks = {message: tmp_path / str(number) for number, message in enumerate((READ_ONLY, FULL))}
    with small_disk(disks[READ_ONLY], DISK_BYTES) as output, small_disk(disks[FULL], DISK_BYTES) as storage:
        older = {READ_ONLY: save_artefact_for_it(output / "artefact"), FULL: save_artefact_for_it(tmp_path / "older")}
        before = {message: contents(artefact) for message, artefact in older.items()}
        settings: dict[str, Any] = {"since": "publish", "force": True, "workers": ONE}
        jobs = {
            READ_ONLY: bench.again(reference, output=str(older[READ_ONLY]), **settings),
            FULL: bench.again(reference, output=str(older[FULL]), storage=str(storage), **settings),
        }
        gates = {message: bench.gate(job, "write_artefact") for message, job in jobs.items()}
        drivers = {message: bench.start(job, gates=True) for message, job in jobs.items()}
        for message, driver in drivers.items():
            driver.until_waiting(gates[message])
        with read_only(output), full(storage):
            for message, driver in drivers.items():
                gates[message].open()
                check_failed(driver.end(), message)
                assert contents(older[message]) == before[message]
            assert [path.name for path in output.iterdir()] == ["artefact"], "no leftovers"
            assert not (jobs[FULL].run / "artefact").exists()
