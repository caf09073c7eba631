"""A run in a store: the driver and every worker have a folder of their own, and only what was kept is there for all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.calibration.storage import RemoteRunFiles
from tests.calibration.report.test_measured import FakeTimer
from tests.calibration.test_executor import DiesAt, DiesTrained
from tests.calibration.tiny_runs import contents, tiny_calibration, write_prompts
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration import pipeline, stages
from tide_core.calibration.data import dataset
from tide_core.calibration.executor import LocalExecutor, StageContext
from tide_core.calibration.ledger import RunFiles, read_ledger
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.report import report
from tide_core.calibration.train.learner import Learner
from tide_core.models.identity import identify


class MovesOn(LocalExecutor):
    """Each task runs on a new machine, which has only the files of the store."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._num = 0

    def map_unordered(self, task: Any, items: Any, *rest: Any) -> Iterator[tuple[Any, Any]]:
        for item in items:
            self._move()
            yield from super().map_unordered(task, [item])

    def train(self, task: Any, item: Any, progress: Any) -> Any:
        self._move()
        return super().train(task, item, progress)

    def run(self, task: Any, item: Any, progress: Any) -> Any:
        self._move()
        return super().run(task, item, progress)

    def _move(self) -> None:
        self._num += 1
        before = self._context.files
        if isinstance(before, RemoteRunFiles):
            self._context.files = machine(before.folder.with_name(f"worker {self._num}"), before.folder.parent.parent)


class MovesOnAndDies(DiesAt, MovesOn):
    pass


class MovesOnAndDiesTrained(DiesTrained, MovesOn):
    pass


def machine(folder: Path, place: Path) -> RemoteRunFiles:
    folder.mkdir(parents=True)
    return RemoteRunFiles(f"file://{place}/store/run", folder)


@pytest.fixture(autouse=True)
def _few_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SHIPPED", write_prompts(tmp_path))
    monkeypatch.setattr(report, "can_plot", lambda: False)


def calibrated(executor_class: type[Any], place: Path, job: str, timer: Any = None) -> dict[str, bytes]:
    """What one job publishes; without a name it runs in a folder that all can see."""
    model, tokenizer = copy.deepcopy(tiny_model("llama")), tiny_tokenizer()
    measured = {"measure_batches": (1,)} if timer else {}
    config = tiny_calibration(data="self", num_samples=30, **measured)
    if job:
        files, theirs = (machine(place / job / name, place) for name in ("driver", "worker 0"))
        at_work: RunFiles = theirs
    else:
        files = at_work = RunFiles(place / "run")  # type: ignore[assignment]
        files.folder.mkdir(parents=True)
    executor = executor_class(StageContext(config, model, tokenizer, identify(model, tokenizer, None), at_work))
    target = place / "published"
    run = pipeline.Pipeline(config, executor, files, SilentProgress())
    run.run(publish_to=target, model_name="tiny", timer=timer)
    return contents(target)


def test_a_run_in_a_store_gives_the_bytes_of_one_in_a_folder_on_any_machine(tmp_path: Path) -> None:
    expected = calibrated(LocalExecutor, tmp_path / "plain", "")
    assert calibrated(MovesOn, tmp_path, "job") == expected
    assert contents(tmp_path / "store" / "run" / "artefact") == expected
    ledger = read_ledger(tmp_path / "store" / "run")
    assert ledger is not None
    assert ledger["stages"].keys() == {"dataset", "collect", "train", "risk", "fast", "publish"}
    assert not list((tmp_path / "store" / "run" / "train").rglob("training*")), "no state is left"


def test_a_run_in_a_store_goes_on_elsewhere_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = calibrated(LocalExecutor, tmp_path / "plain", "")
    with pytest.raises(KeyboardInterrupt):
        calibrated(MovesOnAndDies, tmp_path, "first")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "store/run/prompts").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        calibrated(MovesOnAndDiesTrained, tmp_path, "second")
    assert len(stamps) >= DiesAt.after
    same = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns == stamp]
    assert len(same) >= DiesAt.after, "prompts that the ledger knows are not made up again"
    monkeypatch.setattr(Learner, "begin", lambda self, step: pytest.fail(f"step {step} is done"))
    monkeypatch.setattr(stages, "sequences_of", lambda *args: pytest.fail("every shard is there"))
    assert calibrated(MovesOn, tmp_path, "third") == expected
    assert calibrated(MovesOn, tmp_path, "fourth") == expected, "and a run that is done is looked at and left"


def test_timings_are_in_the_store_as_well(tmp_path: Path) -> None:
    timer = FakeTimer()
    published = calibrated(MovesOn, tmp_path, "job", timer)
    assert [found.keys() >= {"manifest.json", "heads.safetensors"} for found in timer.found] == [True]
    assert b"one machine, float32" in published["report.md"]
    assert contents(tmp_path / "store" / "run" / "artefact") == published
