"""Jobs as they are submitted: through Ray, and twice at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.common.live import ROOT
from tests.job.cluster import JOB_S, START_S, Ended
from tests.job.runs import Bench, Job, pieces

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]


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


def ask_ray(bench: Bench, path: str) -> dict[str, Any]:
    """What `ray job status` and `ray job logs` ask, without the seconds that each command takes to start."""
    with urllib.request.urlopen(f"{bench.cluster.dashboard}/api/jobs/{path}", timeout=60) as reply:
        return cast("dict[str, Any]", json.load(reply))


def logs_of(bench: Bench, name: str) -> str:
    return str(ask_ray(bench, f"{name}/logs")["logs"])


def ended_as(bench: Bench, name: str) -> str:
    """Its status once it has ended."""
    deadline = time.monotonic() + JOB_S
    while (status := str(ask_ray(bench, name)["status"])) in ("PENDING", "RUNNING"):
        assert time.monotonic() < deadline, logs_of(bench, name)
        time.sleep(0.1)
    return status


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
        assert time.monotonic() < deadline, logs_of(bench, "good")
        time.sleep(0.1)
    second = bench.start(job)
    second.until(lambda: "another job works on run" in second.err)
    gate.open()
    status = ended_as(bench, "good")
    return Submitted(job, logs_of(bench, "good"), status, second.end())


def test_a_submitted_job_says_in_its_log_and_by_its_end_how_it_went(
    bench: Bench, reference: Job, submitted: Submitted
) -> None:
    assert submitted.status == "SUCCEEDED", submitted.logs
    assert re.search(r"^artefact: .*", submitted.logs, re.M)
    assert submitted.job.artefact.digest == reference.artefact.digest
    bad = bench.job(storage=str(bench.root / "model" / "config.json"))  # a file, where a folder should be
    words = ("submit", "--submission-id=bad", *CALIBRATE, "deploy.calibrate", "--config", str(bad.config))
    failed = ray_job(bench, *words)
    assert failed.returncode != 0
    assert "Job 'bad' failed" in failed.stdout + failed.stderr
    log = logs_of(bench, "bad")
    assert len(re.findall(r"^tide: error: .*", log, re.M)) == 1
    assert "Traceback" not in log


def test_a_second_job_under_the_name_of_a_running_one_waits_for_its_end(submitted: Submitted) -> None:
    after = submitted.second
    assert after.code == 0, after.err
    assert after.digest == submitted.job.artefact.digest[:16]
    assert f"({after.digest})" in submitted.logs
    assert "tide: risk: done before" in after.err
    assert not pieces(after.err)
