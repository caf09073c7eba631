"""Jobs as they are submitted: through Ray, and twice at once."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.common.live import ROOT
from tests.job.cluster import START_S
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


def test_a_submitted_job_says_in_its_log_and_by_its_end_how_it_went(bench: Bench, reference: Job) -> None:
    wait_for_dashboard(bench)
    good = bench.again(reference, since="publish", workers={"count": 1})
    bad = bench.job(storage=str(bench.root / "model" / "config.json"))  # a file, where a folder should be
    calibrate = ("--", "python", "-m", "deploy.calibrate", "--config")
    done = ray_job(bench, "submit", "--submission-id=good", "--working-dir=.", *calibrate, str(good.config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert good.artefact.digest == reference.artefact.digest
    failed = ray_job(bench, "submit", "--submission-id=bad", "--working-dir=.", *calibrate, str(bad.config))
    assert failed.returncode != 0
    assert "Job 'good' succeeded" in done.stdout
    assert re.search(r"^artefact: .*", done.stdout, re.M)
    assert "Job 'bad' failed" in ray_job(bench, "status", "bad").stdout
    log = ray_job(bench, "logs", "bad").stdout
    assert len(re.findall(r"^tide: error: .*", log, re.M)) == 1
    assert "Traceback" not in log


def test_a_second_job_under_the_name_of_a_running_one_waits_for_its_end(bench: Bench, reference: Job) -> None:
    job = bench.again(reference, since="publish", workers={"count": 1})
    gate = bench.gate(job, "write_artefact")
    first = bench.start(job, gates=True)
    first.until_waiting(gate)
    second = bench.start(job)
    second.until(lambda: "another job works on run" in second.err)
    gate.open()
    before, after = first.end(), second.end()
    assert (before.code, after.code) == (0, 0), before.err + after.err
    assert before.digest == after.digest
    assert "tide: risk: done before" in after.err
    assert not pieces(after.err)
    assert job.artefact.digest == reference.artefact.digest
