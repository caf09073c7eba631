"""On any worker, in any order, however often a task runs: the artefact is the same."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.calibration.tiny_runs import contents, run_tiny, tiny_calibration, write_prompts
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration import pipeline, stages
from tide_core.calibration.data import dataset
from tide_core.calibration.executor import LocalExecutor, StageContext
from tide_core.calibration.ledger import RunFiles, WorkerTime, add_worker_times
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.train.learner import Learner
from tide_core.calibration.train.train import Fitted
from tide_core.models.identity import identify


@pytest.fixture(scope="module", autouse=True)
def _few_shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "SHIPPED", write_prompts(tmp_path_factory.mktemp("shipped")))
        yield


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing disturbed, and of its artefact; not to be written to."""
    folder = tmp_path_factory.mktemp("plain")
    run_with(LocalExecutor, folder)
    return folder


@pytest.fixture(scope="module")
def straight(plain_run: Path) -> dict[str, bytes]:
    return contents(plain_run / "artefact")


class Backwards(LocalExecutor):
    """Runs the last item first and everything twice, as after a death; counts items."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.items: list[Any] = []

    def map_unordered(self, task: Any, items: Sequence[Any], *rest: Any) -> Iterator[tuple[Any, Any]]:
        for item, _ in super().map_unordered(task, items, *rest):
            self.items.append(item)
        yield from super().map_unordered(task, items[::-1], *rest)


def run_with(
    executor_class: type[Any], folder: Path, progress: Progress | None = None, **settings: Any
) -> tuple[Any, dict[str, bytes]]:
    model, tokenizer = copy.deepcopy(tiny_model("llama")), tiny_tokenizer()
    config = tiny_calibration(data="self", num_samples=30, **settings)
    files = RunFiles(folder / "run")
    files.folder.mkdir(parents=True, exist_ok=True)
    executor = executor_class(StageContext(config, model, tokenizer, identify(model, tokenizer, None), files))
    run = pipeline.Pipeline(config, executor, files, progress or SilentProgress())
    result = run.run(publish_to=folder / "artefact", model_name="tiny", timer=None)
    return executor, contents(result.artefact)


def test_the_order_of_the_work_and_doing_it_twice_change_nothing(
    tmp_path: Path, plain_run: Path, straight: dict[str, bytes]
) -> None:
    executor, backwards = run_with(Backwards, tmp_path)
    assert backwards == straight
    assert {type(item).__name__ for item in executor.items} == {"PromptBatch", "Unit"}
    for path in (plain_run / "run" / "shards").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "shards" / path.name).read_bytes()


class DiesAt(LocalExecutor):
    """Ends the run at a certain task."""

    after = 3

    def map_unordered(self, task: Any, items: Sequence[Any], *rest: Any) -> Iterator[tuple[Any, Any]]:
        for number, pair in enumerate(super().map_unordered(task, items, *rest)):
            if number == self.after:
                raise KeyboardInterrupt
            yield pair


def test_prompts_written_before_a_kill_are_not_written_again(tmp_path: Path, straight: dict[str, bytes]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with(DiesAt, tmp_path)
    folder = tmp_path / "run" / "prompts"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    _, resumed = run_with(LocalExecutor, tmp_path)
    assert resumed == straight
    assert DiesAt.after <= len(before) <= DiesAt.after + 1 < len(list(folder.iterdir()))
    kept = [name for name, time in before.items() if (folder / name).stat().st_mtime_ns == time]
    assert len(kept) >= DiesAt.after


def test_prompts_are_not_written_again_if_records_are_lost(
    tmp_path: Path, plain_run: Path, straight: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "dataset" / "test.jsonl").unlink()
    monkeypatch.setattr(stages, "write_prompts", lambda *args: pytest.fail("they are there"))
    assert run_with(LocalExecutor, tmp_path)[1] == straight


class DiesTrained(LocalExecutor):
    """Ends the run after training, before the ledger records it."""

    def train(self, task: Any, item: Any, progress: Any) -> Any:
        super().train(task, item, progress)
        raise KeyboardInterrupt


def test_a_training_that_ended_before_the_ledger_knew_is_not_done_again(
    tmp_path: Path, straight: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with(DiesTrained, tmp_path)
    monkeypatch.setattr(Learner, "begin", lambda self, step, *spent: pytest.fail(f"step {step} is done"))
    _, resumed = run_with(LocalExecutor, tmp_path)
    assert resumed == straight
    assert not list((tmp_path / "run" / "train").rglob("training*")), "no state is left"


class Timed(LocalExecutor):
    """Reports one second of work per item."""

    num = 0

    def map_unordered(self, task: Any, items: Sequence[Any], *rest: Any) -> Iterator[tuple[Any, Any]]:
        for pair in super().map_unordered(task, items, *rest):
            self.num += 1
            yield pair

    def worker_times(self) -> Sequence[WorkerTime]:
        return [WorkerTime("worker 1", "node 1", self.num, float(self.num), 1)]


class TimedDies(DiesAt, Timed):
    pass


def test_what_workers_did_for_a_driver_that_died_counts_in_the_end(tmp_path: Path, plain_run: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with(TimedDies, tmp_path)
    run_with(Timed, tmp_path)
    num = sum(len(list((plain_run / "run" / folder).iterdir())) for folder in ("prompts", "shards"))
    report = (tmp_path / "artefact" / "report.md").read_text()
    assert f"| worker 1 | node 1 | {num} | {num:.1f} | 2 |" in report


class Collects(LocalExecutor):
    """Ends the run before training."""

    def train(self, task: Any, item: Any, progress: Any) -> Any:
        raise KeyboardInterrupt


def test_the_number_of_lost_workers_is_shown_while_shards_are_made(tmp_path: Path) -> None:
    class Battered(Collects):
        num_restarts = 2

    received: list[Any] = []

    class Recorder(SilentProgress):
        @contextlib.contextmanager
        def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Any]:
            class Stage:
                def update(self, n: int = 1, **info: object) -> None:
                    if name == "collect":
                        received.append(info.get("restarts"))

            yield Stage()

    for executor_class, expected in ((Battered, 2), (Collects, None)):
        received.clear()
        with pytest.raises(KeyboardInterrupt):
            run_with(executor_class, tmp_path / executor_class.__name__, Recorder())
        assert set(received) == {expected}


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    kept: list[str] = []

    class Files(RunFiles):
        def push(self, names: Any) -> None:
            kept.extend(names)

    class Second:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_reduce(self, tensors: Any) -> None:
            pass

    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    config, identity = tiny_calibration(data="self"), identify(model, tokenizer, None)
    context = StageContext(config, model, tokenizer, identity, Files(tmp_path), Second(rank))
    monkeypatch.setattr(stages, "_part", lambda *args: SimpleNamespace(num_sequences=3, num_tokens=40))
    monkeypatch.setattr(stages, "_shortlist", lambda *args: None)
    monkeypatch.setattr(stages, "fit", lambda *args, **options: Fitted([], 4))
    item = stages.TrainItem({}, ("1:affine",))
    assert stages.train(context, item, SilentProgress()) == stages.Trained(3, 40, steps=4)
    assert kept == ([stages.CANDIDATES] if rank == 0 else [])
    assert (tmp_path / stages.CANDIDATES).exists() == (rank == 0)


def test_workers_of_one_name_on_one_node_count_as_one() -> None:
    before = [WorkerTime("worker 1", "node 1", 2, 3.0, 1), WorkerTime("worker 2", "not placed", 0, 0.0, 0)]
    now = [WorkerTime("worker 1", "node 1", 1, 0.5, 0), WorkerTime("worker 1", "node 2", 4, 1.0, 0)]
    assert add_worker_times(before, now) == [WorkerTime("worker 1", "node 1", 3, 3.5, 1), now[1]]


def test_prompts_of_the_model_survive_their_file(tmp_path: Path) -> None:
    made = [stages.WrittenPrompt('Line one\nline two \u2028 and "quotes"', True), stages.WrittenPrompt("", False)]
    raw = "".join(f"{line}\n" for line in map(_json, made)).encode()
    assert stages.read_prompts(raw) == made


def _json(made: Any) -> str:
    import json

    return json.dumps(list(made), ensure_ascii=False)


def test_an_artefact_may_stay_in_the_run_alone(tmp_path: Path) -> None:
    """The output is the run's own folder: nothing is copied."""
    result = run_tiny(tmp_path, name="run/artefact")
    assert contents(result.artefact).keys() >= {"manifest.json", "heads.safetensors", "report.md"}
