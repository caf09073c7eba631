"""Whole calibrations of a tiny model: what they publish, and what is left of one that was killed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.calibration.tiny_runs import PROMPTS, contents, run_tiny, write_prompts
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration import pipeline, stages
from tide_core.calibration.data import dataset
from tide_core.calibration.ledger import locked, read_ledger
from tide_core.calibration.progress import SilentProgress, Stage
from tide_core.calibration.report import report
from tide_core.calibration.report.plots import can_plot
from tide_core.calibration.train import candidates, choice
from tide_core.calibration.train.candidates import load_candidates
from tide_core.errors import ConfigError
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.models.identity import identify


class Killed(BaseException):
    """Ends a run as a signal would: nothing in the code under test expects it."""


class Spy(SilentProgress):
    """Keeps notes, and kills the run when a stage has had so many updates; 0: as it begins."""

    def __init__(self, kill_in: str | None = None, after: int = 0) -> None:
        self.notes: list[str] = []
        self.stages: list[str] = []
        self._kill_in, self._after = kill_in, after

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        self.stages.append(name)
        left = self._after if name == self._kill_in else None

        class Counting:
            def update(self, n: int = 1, **info: object) -> None:
                nonlocal left
                if left is not None:
                    left -= 1
                    if left <= 0:
                        raise Killed

        if left == 0:
            raise Killed
        yield Counting()

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    """Drawing takes longer than a tiny calibration; one test does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "can_plot", lambda: False)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, _no_plots: None) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return contents(run_tiny(folder).artefact)


def test_ten_prompts_give_an_artefact_that_loads_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_plot", can_plot)
    result = run_tiny(tmp_path)

    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    artefact = load_artefact(result.artefact, identify(model, tokenizer, None))
    data = artefact.manifest.data
    assert artefact.digest == result.digest
    assert data.kind == "local files"
    assert data.num_train_sequences + data.num_calibration_sequences + data.num_test_sequences == len(PROMPTS)
    assert 0 in artefact.shortlist.tolist()  # the end-of-text id
    assert result.report.read_text(encoding="utf-8").startswith("# Calibration of ")
    assert any("pay" in line for line in result.verdict)
    assert str(tmp_path).encode() not in b"".join(contents(result.artefact).values())


def test_the_model_calibrates_on_its_own_text(tmp_path: Path) -> None:
    result = run_tiny(tmp_path, data="self", num_samples=12)

    assert load_artefact(result.artefact, None).manifest.data.kind == "self"


def test_shipped_prompts_are_held_out_among_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SHIPPED", write_prompts(tmp_path, PROMPTS[:3]))
    result = run_tiny(tmp_path, data="self", num_samples=14)

    parts = json.loads((result.artefact / "report.json").read_bytes())["parts"]
    sizes = {part["name"]: part["num_sequences"] for part in parts}
    assert sizes["given"] == 3
    assert sum(sizes.values()) == 14
    found = load_artefact(result.artefact, None).manifest.data
    assert found.num_calibration_sequences == sizes["calibration"] + 3
    assert "prompts that people wrote" in result.report.read_text(encoding="utf-8")


def test_a_shortage_of_distinct_prompts_is_noted_with_the_requested_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(pool: Any, *args: Any) -> None:
        pool.num_near = 7

    monkeypatch.setattr(pipeline, "add_self_prompts", short)
    spy = Spy("collect")
    with pytest.raises(Killed):
        run_tiny(tmp_path, data="self", num_samples=1000, progress=spy)

    [note] = [note for note in spy.notes if note.startswith("dataset: ")]
    assert "; 7 near-duplicate prompts of the model dropped; " in note
    assert note.endswith(" of the requested 1000")


def test_documents_are_calibrated_on_too(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"{n} the cat sat on the mat and the dog sat on the log" for n in range(12)))

    assert load_artefact(run_tiny(tmp_path, data=path).artefact, None).manifest.data.num_train_sequences > 0


def test_block_heads_at_two_checkpoints_are_compared_and_one_is_published(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"heads": ("block",), "checkpoints": (1, 2), "deep_inputs": True}
    result = run_tiny(tmp_path, **settings)

    [checkpoint] = load_artefact(result.artefact, None).manifest.checkpoints
    assert checkpoint.head.kind == "block"
    assert checkpoint.layer in (1, 2)
    text = result.report.read_text(encoding="utf-8")
    assert "| 1 | block |" in text
    assert "| 2 | block |" in text


def test_a_wide_model_gets_the_head_that_its_timed_passes_and_traces_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run keeps its choice, though another timing would choose others."""
    monkeypatch.setattr(candidates, "WIDE_FROM", 48)
    monkeypatch.setattr(candidates, "WIDTH_STEP", 4)
    settings: dict[str, Any] = {"heads": ("block",), "checkpoints": (), "deep_inputs": True}
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("train", 1), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "measure_costs", lambda *_: pytest.fail("the choice is made"))
        result = run_tiny(tmp_path, **settings)

    data = json.loads((result.artefact / "report.json").read_bytes())
    considered = {each["name"]: each for each in data["considered"]}
    assert set(considered) == {"1:block:deep:muon", "1:block:deep:muon:inner=12", "1:block:deep:muon:inner=24"}
    assert all(each["tokens_per_s"] > 0 for each in considered.values())
    trained = {name for name, each in considered.items() if each["trained"]}
    assert {each["name"] for each in data["candidates"]} == trained
    assert len(trained) == choice.MOST_TRAINED
    text = result.report.read_text(encoding="utf-8")
    assert "## Exits considered" in text
    assert "| 1:block:deep:muon:inner=12 | 12 |" in text
    assert "passes timed on this device" in text
    [checkpoint] = load_artefact(result.artefact, None).manifest.checkpoints
    assert checkpoint.head.inner_width == considered[data["chosen"]]["inner"]


def test_a_run_whose_time_is_spent_publishes_what_it_reached_and_says_so(tmp_path: Path) -> None:
    spy = Spy()
    result = run_tiny(tmp_path, progress=spy, steps=5000, minutes=0.01)
    load_artefact(result.artefact, None)
    text = result.report.read_text(encoding="utf-8")
    found = re.search(r"Training ended after (\d+) of 5000 steps: the time for the run, 0.01 minutes, was spent", text)
    assert found is not None
    assert any(f"the time is over after {found[1]} of 5000 steps" in note for note in spy.notes)
    assert json.loads((result.artefact / "report.json").read_text())["curve"][-1]["steps"] == int(found[1])
    assert "--set minutes=0.01" in text


def test_data_takes_its_share_of_the_time_and_held_out_parts_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "SHIPPED", write_prompts(tmp_path))
    monkeypatch.setattr(pipeline, "SHARE_OF_PROMPTS", 0.0)
    monkeypatch.setattr(pipeline, "SHARE_OF_DATA", 0.0)
    spy, run = Spy(), tmp_path / "run"
    run_tiny(tmp_path, data="self", progress=spy, minutes=1000.0, num_samples=64, generation_batch=4)
    assert len(list((run / "prompts").iterdir())) == 1, "of a dozen batches of prompts"
    records = {path.stem: len(path.read_text().splitlines()) for path in (run / "dataset").iterdir()}
    shards = [path.name for path in (run / "shards").iterdir()]
    made = {part: sum(name.startswith(f"{part}-") for name in shards) for part in records}
    assert records["train"] > 4, "more than one shard"
    assert made == {"train": 1} | {part: -(-num // 4) for part, num in records.items() if part != "train"}
    [point] = json.loads((tmp_path / "artefact" / "report.json").read_text())["curve"]
    assert point["steps"] == 4
    assert point["minutes"] >= 0.0
    assert any(re.fullmatch(r"collect: \d+ of \d+ sequences in the time for them", note) for note in spy.notes)


def test_what_was_measured_is_what_is_published(tmp_path: Path) -> None:
    """Artefacts store half the bits; traces were made with the weights that are left."""
    artefact = load_artefact(run_tiny(tmp_path).artefact, None)

    [measured] = load_candidates(tmp_path / "run" / "train" / "candidates.safetensors")
    for ours, theirs in ((measured.head, artefact.heads[0]), (measured.router, artefact.routers[0])):
        weights = theirs.state_dict()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.state_dict().items())


def test_the_same_settings_give_the_same_bytes(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    assert contents(run_tiny(tmp_path).artefact) == uninterrupted


KILLS = [("collect", 0), ("collect", 1), ("collect", 3), ("train", 0), ("train", 1), ("trace test", 0)]
KILLS += [("trace calibration", 0), ("trace calibration", 1)]


@pytest.mark.parametrize(("stage", "after"), KILLS)
def test_a_killed_run_goes_on_to_the_same_bytes(
    tmp_path: Path, uninterrupted: dict[str, bytes], stage: str, after: int
) -> None:
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy(stage, after))
    assert not (tmp_path / "artefact").exists()

    spy = Spy()
    assert contents(run_tiny(tmp_path, progress=spy).artefact) == uninterrupted
    assert "dataset: done before" in spy.notes


def test_a_run_that_is_the_same_every_time_states_no_minutes(tmp_path: Path) -> None:
    [point] = json.loads((run_tiny(tmp_path).artefact / "report.json").read_text())["curve"]
    assert (point["steps"], point["minutes"]) == (4, None)


def test_a_run_killed_while_it_publishes_goes_on_to_the_same_bytes(
    tmp_path: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = pipeline.install_artefact

    def after(*args: Any) -> Any:
        install(*args)
        raise Killed

    monkeypatch.setattr(pipeline, "install_artefact", after)
    with pytest.raises(Killed):
        run_tiny(tmp_path)
    monkeypatch.undo()
    assert contents(tmp_path / "artefact") == uninterrupted  # it is there, but the ledger does not know yet

    assert contents(run_tiny(tmp_path).artefact) == uninterrupted


def test_a_run_killed_in_collect_loses_one_batch(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("collect", 3))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "shards").iterdir()}

    run_tiny(tmp_path)

    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "shards").iterdir()}
    assert len(before) == 3 < len(after)
    assert all(after[name] == time for name, time in before.items())


def test_sequences_collected_before_a_kill_are_shown_as_done(tmp_path: Path) -> None:
    class Counts(Spy):
        done, num = 0, 0

        @contextlib.contextmanager
        def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Any]:
            counts = self

            class Counting:
                def update(self, n: int = 1, **info: object) -> None:
                    counts.num += n if name == "collect" else 0

            if name == "collect":
                assert total == len(PROMPTS)
                counts.done = done
            yield Counting()

    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("collect", 3))
    counts = Counts()
    run_tiny(tmp_path, progress=counts)
    assert counts.done >= 3
    assert counts.done + counts.num == len(PROMPTS)


def test_a_finished_run_is_checked_and_not_done_again(tmp_path: Path) -> None:
    first, spy = run_tiny(tmp_path), Spy()

    again = run_tiny(tmp_path, progress=spy)

    assert again == first
    assert spy.stages == []


def test_other_settings_under_the_same_run_are_refused_with_the_difference(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("train"))

    with pytest.raises(ConfigError, match=r"2 changes.*seed was 0 and is 1; steps was 4 and is 5"):
        run_tiny(tmp_path, steps=5, seed=1)


def test_another_model_under_the_same_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("train"))

    with pytest.raises(ConfigError, match="architecture was 'LlamaForCausalLM' and is 'Qwen2ForCausalLM'"):
        run_tiny(tmp_path, family="qwen2")


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


SPOILS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a changed shard": ("shards/train-00000.safetensors", _flip),
    "a missing shard": ("shards/calibration-00000.safetensors", Path.unlink),
    "a changed shortlist": ("shortlist.safetensors", _flip),
    "changed records": ("dataset/test.jsonl", _flip),
    "changed candidates": ("train/candidates.safetensors", _flip),
    "a changed choice": ("train/choice.json", _flip),
    "changed traces": ("risk/calibration.msgpack", _flip),
}


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_not_as_it_was_left_is_found_and_made_again(
    tmp_path: Path, uninterrupted: dict[str, bytes], what: str
) -> None:
    run_tiny(tmp_path)
    name, spoil = SPOILS[what]
    spoil(tmp_path / "run" / name)
    spy = Spy()

    assert contents(run_tiny(tmp_path, progress=spy).artefact) == uninterrupted
    assert any(f"{name} is missing or has changed" in note for note in spy.notes)


@pytest.mark.parametrize("ended", [True, False])
def test_a_dataset_made_again_with_fewer_records_leaves_no_shard_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(pipeline, "source_of", lambda config: {})  # as of a data set that is loaded by its name
    with contextlib.suppress(Killed):
        run_tiny(tmp_path, progress=Spy() if ended else Spy("train"))
    many = {path.name for path in (tmp_path / "run" / "shards").iterdir()}
    (tmp_path / "run" / "dataset" / "test.jsonl").unlink()

    run_tiny(tmp_path, data=write_prompts(tmp_path, PROMPTS[:4]))

    few = {path.name for path in (tmp_path / "run" / "shards").iterdir()}
    assert few < many
    assert {f"shards/{name}" for name in few} == set(read_ledger(tmp_path / "run")["shards"])  # type: ignore[index]


def test_a_training_on_records_that_are_made_again_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is of other sequences, and would be refused."""
    monkeypatch.setattr(pipeline, "source_of", lambda config: {})  # as of a data set that is loaded by its name

    def killed(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stages, "save_candidates", killed)
        with pytest.raises(Killed):
            run_tiny(tmp_path)
    assert (tmp_path / "run" / stages.STATE).exists()
    (tmp_path / "run" / "dataset" / "test.jsonl").unlink()

    few = run_tiny(tmp_path, data=write_prompts(tmp_path, PROMPTS[:4]))

    (tmp_path / "straight").mkdir()
    assert contents(few.artefact) == contents(run_tiny(tmp_path / "straight", data=tmp_path / "prompts.jsonl").artefact)


@pytest.mark.parametrize("ended", [True, False])
def test_other_data_under_the_same_run_is_refused_with_the_difference(tmp_path: Path, ended: bool) -> None:
    with contextlib.suppress(Killed):
        run_tiny(tmp_path, progress=Spy() if ended else Spy("collect"))
    changed = write_prompts(tmp_path, [*PROMPTS, "And one more."])

    with pytest.raises(ConfigError, match=r"prompts\.jsonl was '[0-9a-f]{56,}.* and is '"):
        run_tiny(tmp_path, data=changed)


def test_data_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(config: Any) -> Any:
        pool = gather(config)
        write_prompts(tmp_path, PROMPTS[:5])
        return pool

    gather = pipeline.gather
    monkeypatch.setattr(pipeline, "gather", read)
    with pytest.raises(ConfigError, match="do not change while they are read"):
        run_tiny(tmp_path)
    assert not list((tmp_path / "run").rglob("*.jsonl"))


def test_a_shard_spoiled_in_an_unfinished_collect_is_made_again(
    tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    with pytest.raises(Killed):
        run_tiny(tmp_path, progress=Spy("collect", 3))
    _flip(tmp_path / "run" / "shards" / "train-00001.safetensors")
    spy = Spy()

    assert contents(run_tiny(tmp_path, progress=spy).artefact) == uninterrupted
    assert "shard shards/train-00001.safetensors is missing or has changed; it is made again" in spy.notes


def test_a_spoiled_ledger_is_refused(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    ledger = tmp_path / "run" / "ledger.msgpack"
    ledger.write_bytes(ledger.read_bytes()[:-5])

    with pytest.raises(ConfigError, match="ledger"):
        run_tiny(tmp_path)


def test_two_processes_do_not_work_on_one_run(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="no other process"):
        run_tiny(tmp_path)


def test_data_that_cannot_be_read_fails_and_leaves_no_text_of_its_own(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"\xff\xfe" * 100 + b"\n")
    for data in (tmp_path / "missing.jsonl", bad):
        with pytest.raises(ConfigError, match="data"):
            run_tiny(tmp_path, data=data)
        assert not (tmp_path / "artefact").exists()
        assert not list((tmp_path / "run").rglob("*.safetensors"))
        (tmp_path / "run" / "ledger.msgpack").unlink(missing_ok=True)


def test_an_output_that_is_taken_is_refused_before_any_work(tmp_path: Path) -> None:
    taken = tmp_path / "artefact"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match="a name that is free"):
        run_tiny(tmp_path)

    assert not (tmp_path / "run").exists()
    assert contents(taken) == {"notes.txt": b"mine"}


def test_force_replaces_an_artefact_of_another_run(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    (tmp_path / "other").mkdir()
    run_tiny(tmp_path / "other", data=write_prompts(tmp_path), seed=7, name="../artefact")

    with pytest.raises(ConfigError, match="--force"):
        run_tiny(tmp_path)
    assert contents(run_tiny(tmp_path, force=True).artefact) == uninterrupted


def test_a_checkpoint_past_the_last_layer_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoints"):
        run_tiny(tmp_path, checkpoints=(1, 4))

    assert read_ledger(tmp_path / "run") is None
