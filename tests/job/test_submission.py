"""Jobs as they are submitted: through Ray, and twice at once."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.live import ROOT
from tests.job.cluster import JOB_S, START_S, Ended
from tests.job.runs import Bench, Job, pieces

pytestmark = pytest.mark.serve


def ray_job(bench: Bench, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ray"), "job", words[0], "--address", bench.cluster.dashboard]
    return subprocess.run(
        [*command, *words[1:]], cwd=ROOT, env=bench.cluster.environment, capture_output=True, text=True
    )


def wait_for_dashboard(bench: Bench) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{bench.cluster.dashboard}/api/version", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@dataclass(frozen=True)
class Submitted:
    """Two jobs for one run: the first through Ray, the second by its command while the first was at its last stage."""

    job: Job
    logs: str
    status: str
    second: Ended


CALIBRATE = ("--working-dir=.", "--", "python", "-m")


@pytest.fixture(scope="module")
def submitted(bench: Bench, reference: Job) -> Submitted:
    wait_for_dashboard(bench)
    job = bench.again(reference, since="publish", workers={"count": 1})
    gate = bench.gate(job, "write_artefact")
    words = ("submit", "--submission-id=good", "--no-wait", *CALIBRATE, "tests.job.gates", "--config", str(job.config))
    done = ray_job(bench, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + JOB_S
    while not gate.waiting:
        assert time.monotonic() < deadline, ray_job(bench, "logs", "good").stdout
        time.sleep(0.1)
    second = bench.start(job)
    second.until(lambda: "another job works on run" in second.err)
    gate.open()
    logs = ray_job(bench, "logs", "--follow", "good")
    return Submitted(job, logs.stdout, ray_job(bench, "status", "good").stdout, second.end())


def test_a_submitted_job_says_in_its_log_and_by_its_end_how_it_went(
    bench: Bench, reference: Job, submitted: Submitted
) -> None:
    assert "Job 'good' succeeded" in submitted.status, submitted.logs
    assert re.search(r"^artefact: .*", submitted.logs, re.M)
    assert submitted.job.artefact.digest == reference.artefact.digest
    bad = bench.job(storage=str(bench.root / "model" / "config.json"))  # a file, where a folder should be
    words = ("submit", "--submission-id=bad", *CALIBRATE, "deploy.calibrate", "--config", str(bad.config))
    failed = ray_job(bench, *words)
    assert failed.returncode != 0
    assert "Job 'bad' failed" in failed.stdout + failed.stderr
    log = ray_job(bench, "logs", "bad").stdout
    assert len(re.findall(r"^tide: error: .*", log, re.M)) == 1
    assert "Traceback" not in log


def test_a_second_job_under_the_name_of_a_running_one_waits_for_its_end(submitted: Submitted) -> None:
    after = submitted.second
    assert after.code == 0, after.err
    assert after.digest == submitted.job.artefact.digest[:16]
    assert f"({after.digest})" in submitted.logs
    assert "tide: risk: done before" in after.err
    assert not pieces(after.err)
