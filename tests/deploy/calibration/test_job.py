"""The command of a job: what it takes from where, and that two of them never work on one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import typer

from deploy import calibrate
from deploy.calibration.settings import JobSettings, read_settings
from deploy.calibration.worker import SEEN
from deploy.published import Pointer
from tests.deploy.calibration.fake_cluster import Notes
from tide_core.calibration import pipeline
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.ledger import LEDGER, Ledger, RunFiles, WorkerTime, locked
from tide_core.errors import ConfigError


class Leases:
    """Names that are taken, and until when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.held = 0.0, dict[str, float]()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(calibrate, "time", clock)
        monkeypatch.setattr(calibrate, "on_driver_node", lambda: "here")
        monkeypatch.setattr(calibrate, "_Lease", SimpleNamespace(options=self._options))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _options(self, *, name: str, scheduling_strategy: str) -> Any:
        assert scheduling_strategy == "here"

        def remote() -> str:
            if self.held.get(name, -1.0) >= self.now:
                raise ValueError(f"the name {name} is taken")
            self.held[name] = float("inf")
            return name

        return SimpleNamespace(remote=remote)


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> Leases:
    return Leases(monkeypatch)


def settings(storage: Any = "/runs", **changes: Any) -> JobSettings:
    return read_settings({"name": "run", "storage": str(storage), **changes})


def test_a_run_that_another_job_works_on_is_refused_after_a_while(leases: Leases) -> None:
    notes = Notes()
    calibrate._lease(settings(), notes)
    with pytest.raises(ConfigError, match="one that no other job works on now"):
        calibrate._lease(settings(), notes)
    assert calibrate.CLEAN_UP_S <= leases.now <= calibrate.CLEAN_UP_S + 2
    assert notes.lines == ["another job works on run run, or did just now; waiting for its end"], "once"


def test_a_job_waits_for_the_end_of_one_that_was_killed(leases: Leases) -> None:
    held = calibrate._lease(settings(), Notes())
    leases.held[held] = leases.now + 20.0
    assert calibrate._lease(settings(), Notes()) == held
    assert 20.0 <= leases.now <= 22.0


def test_runs_of_other_names_and_in_other_storages_are_other_runs(leases: Leases) -> None:
    asked = [settings(), settings(name="other"), settings("/elsewhere"), settings("s3://bucket/runs?region=x")]
    assert len({calibrate._lease(each, Notes()) for each in asked}) == 4
    assert leases.now == 0.0


@pytest.fixture
def executor(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a job does, in order, with an executor and a pipeline that do nothing."""
    done: list[str] = []

    class Executor:
        model_name = "demo"

        def __init__(self, job: JobSettings, progress: Any) -> None:
            self._folder = None if "://" in job.storage else Path(job.storage) / job.name

        def __enter__(self) -> Executor:
            return self

        def __exit__(self, *exc_info: object) -> None:
            done.append("stop")

        def start_workers(self) -> None:
            if self._folder is not None:
                assert (self._folder / SEEN).exists(), "workers look for it"
                with pytest.raises(ConfigError), locked(self._folder):
                    pass
            done.append("start")

    def run(self: Any, *, publish_to: Path, timer: Any, **_: Any) -> Any:
        done.append(f"run to {publish_to.name}{'' if timer is None else ', timed'}")
        workers = (WorkerTime("worker 1", "node 1", 3, 4.5, 1), WorkerTime("worker 2", "node 1", 2, 4.0, 0))
        return pipeline.CalibrationResult(publish_to, publish_to / "report.md", ("it pays",), "ab" * 32, workers)

    monkeypatch.setattr(calibrate, "RayExecutor", Executor)
    monkeypatch.setattr(calibrate, "MeteredProgress", lambda progress, name: progress)
    monkeypatch.setattr(pipeline.Pipeline, "__init__", lambda self, *args: None)
    monkeypatch.setattr(pipeline.Pipeline, "run", run)
    monkeypatch.setattr(ray, "init", lambda **how: done.append(f"init {how['namespace']}"))
    monkeypatch.setattr(ray, "kill", lambda lease: done.append("lease ended"))
    return done


def test_a_job_publishes_its_artefact_under_its_name(
    tmp_path: Path, executor: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, Path, str]] = []

    class Publication:
        def __init__(self, place: str) -> None:
            self._place = place

        def publish(self, folder: Path, by: str) -> Pointer:
            calls.append((self._place, folder, by))
            executor.append("published")
            return Pointer("ab" * 32, None, by, "now")

    monkeypatch.setattr(calibrate, "Publication", Publication)
    calibrate.run(settings(tmp_path, publish="s3://bucket/published"), Notes())
    assert calls == [("s3://bucket/published", tmp_path / "run" / "artefact", "run run")]
    assert executor.index("published") < executor.index("stop"), "while this job alone works on the run"
    assert f"published at s3://bucket/published: nothing -> {'ab' * 8}" in capsys.readouterr().out


def test_a_job_locks_its_run_and_prints_the_work_of_each_worker(
    tmp_path: Path, executor: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate.run(settings(tmp_path), Notes())
    assert executor == ["init tide", "start", "run to artefact, timed", "stop", "lease ended"]
    assert capsys.readouterr().out.splitlines() == [
        "it pays",
        "worker 1 on node 1: 3 pieces in 4.5 s, 1 restarts",
        "worker 2 on node 1: 2 pieces in 4.0 s",
        f"artefact: {tmp_path}/run/artefact ({'ab' * 8})",
    ]


def test_an_output_that_is_taken_is_refused_before_any_work_unless_this_run_has_put_it_there(
    tmp_path: Path, executor: list[str], leases: Leases
) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / "notes.txt").touch()
    asked = settings(tmp_path, output=str(output), measure=False)
    with pytest.raises(ConfigError, match="a name that is free"):
        calibrate.run(asked, Notes())
    assert executor == ["init tide"]
    (tmp_path / "run").mkdir()
    Ledger(RunFiles(tmp_path / "run"), CalibrationConfig(), {}, {}).record_publishing(output)
    leases.held.clear()  # Ray has ended it with its job
    calibrate.run(asked, Notes())
    assert executor[1:] == ["init tide", "start", "run to mine", "stop", "lease ended"]


def test_what_a_run_in_a_store_has_published_is_known_to_the_next_job(tmp_path: Path, executor: list[str]) -> None:
    """Which begins with an empty folder, so the ledger must be brought first."""
    output, store = tmp_path / "mine", tmp_path / "store" / "run"
    for folder in (output, store):
        folder.mkdir(parents=True)
    (output / "manifest.json").touch()
    Ledger(RunFiles(store), CalibrationConfig(), {}, {}).record_publishing(output)
    assert (store / LEDGER).exists()
    calibrate.run(settings(f"file://{tmp_path}/store", output=str(output)), Notes())
    assert "run to mine, timed" in executor


def test_what_is_given_on_the_command_line_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "job.yaml", []
    file.write_text("name: run\nstorage: /runs\nmodel: mine\ncalibration: {steps: 7, seed: 3, num_samples: 50}\n")
    monkeypatch.setattr(calibrate, "run", lambda settings, progress: seen.append(settings))
    given = {"name": "b", "storage": "/s", "output": "/o", "samples": 20, "settings": ["seed=4"]}
    for options in ({}, given):
        with pytest.raises(typer.Exit) as ended:
            calibrate.main(file, quiet=True, **options)  # type: ignore[arg-type]
        assert ended.value.exit_code == 0
    as_it_is, changed = seen
    assert (as_it_is.name, as_it_is.storage, as_it_is.output, as_it_is.model) == ("run", "/runs", None, "mine")
    assert (changed.name, changed.storage, changed.output, changed.model) == ("b", "/s", "/o", "mine")
    assert [(each.config.steps, each.config.seed, each.config.num_samples) for each in seen] == [(7, 3, 50), (7, 4, 20)]


def test_a_driver_that_plans_does_not_import_the_library_of_models() -> None:
    code = "import sys, deploy.calibrate, tide_core.calibration.pipeline, tide_core.evaluation.speedup; "
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n", "it takes 4 seconds, and workers do it themselves"
