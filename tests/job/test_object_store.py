"""A run that is kept in an object store: nothing is shared between the workers but the store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.common.live import ROOT, environment_of, free_ports
from tests.calibration.tiny_runs import tiny_calibration
from tests.evaluation.on_disk import save_model
from tide_core.calibration.config import CalibrationConfig
from tide_core.exits.artefact.artefact import load_artefact

pytestmark = pytest.mark.serve

EMULATOR = ROOT / "build" / "emulator-venv" / "bin" / "moto_server"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty bucket."""
    if not EMULATOR.exists():
        pytest.skip("needs the object store emulator: make emulator")
    [port] = free_ports(1)
    with (tmp_path / "emulator.log").open("wb") as log:
        process = subprocess.Popen([EMULATOR, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(asked, timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, (tmp_path / "emulator.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"s3://bucket/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Of clusters that come with their drivers. One whose driver was killed is ended here."""
    folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: Ray puts sockets in it, and their paths have a limit
    yield folder
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == str(folder):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def calibrated(model: Path, config: CalibrationConfig, output: Path) -> None:
    """By the command, with as many threads as a worker has."""
    words = [sys.executable, "-m", "tide_core.cli", "calibrate", "--model", str(model), "--output", str(output), "-q"]
    for key, value in config.to_mapping().items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)


def test_a_run_in_an_object_store_survives_its_driver_and_gives_the_artefact_of_a_run_in_a_folder(
    tmp_path: Path, store: str, ray_folder: Path
) -> None:
    model = save_model(tmp_path / "model")
    config = tiny_calibration(data="self", num_samples=60, generation_batch=6)
    settings = {
        "name": "stored",
        "storage": store,
        "output": str(tmp_path / "stored"),
        "model": str(model),
        "dtype": "float32",
        "measure": False,
        "calibration": config.to_mapping(),
        "workers": {"count": 2, "num_cpus": 1.0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.calibrate", "--config", str(tmp_path / "job.yaml")],
            cwd=ROOT,
            env={**environment_of(ray_folder, free_ports(4)), **CREDENTIALS},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    assert first.stderr is not None
    assert any("shards/train-00002" in line for line in first.stderr)
    first.kill()
    first.communicate()
    second = start()
    out, err = second.communicate(timeout=180)
    assert second.returncode == 0, err
    assert "dataset: done before" in err

    calibrated(model, config, tmp_path / "plain")
    digest = load_artefact(tmp_path / "plain", None).digest
    assert load_artefact(tmp_path / "stored", None).digest == digest
    assert digest[:16] in out
