"""The ledger of a run: every change is on disk at once, and what does not belong to it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tide_core.calibration import pipeline
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.executor import ModelInfo
from tide_core.calibration.ledger import (
    FORMAT_VERSION,
    LEDGER,
    STAGES,
    Ledger,
    RunFiles,
    ShardEntry,
    WorkerTime,
    check_output,
    digest_of,
    locked,
    read_ledger,
)
from tide_core.errors import ConfigError
from tide_core.identity import ModelIdentity

WORKERS = [WorkerTime("worker 1", "node 1", 3, 4.5, 1)]
FACTS = ModelInfo(ModelIdentity("tiny", "Llama", 3, 8, 64, "00", "00"), "cpu", 64, (0,), 2)


def ledger(folder: Path, model: Any = None, **changes: Any) -> Ledger:
    return Ledger(RunFiles(folder), CalibrationConfig(**changes), model or {}, {"prompts.jsonl": "00"})


def test_every_change_is_on_disk_for_the_next_process(tmp_path: Path) -> None:
    entries = [ShardEntry(f"shards/train-0000{number}", f"{number}{number}", 2, 30) for number in range(2)]
    first = ledger(tmp_path)
    for entry in entries:
        first.add_shard(entry, WORKERS[:1])
    assert ledger(tmp_path).shards == {entry.name: entry for entry in entries}
    assert ledger(tmp_path).workers == WORKERS
    first.drop_shard(entries[0].name)
    assert list(ledger(tmp_path).shards) == [entries[1].name]
    more = [*WORKERS, WorkerTime("trainer 1", "node 1", 1, 9.0, 0)]
    first.finish("train", {"train/a": "00"}, {"num_tokens": 5}, more)
    assert ledger(tmp_path).info("train") == {"num_tokens": 5}
    assert ledger(tmp_path).workers == more, "of a stage that makes no shards as well"
    first.record_publishing(tmp_path / "artefact")
    assert (read_ledger(tmp_path) or {})["published"] == str(tmp_path / "artefact")
    first.reopen("train")
    assert ledger(tmp_path).info("train") is None


def test_a_stage_that_is_done_again_takes_all_later_ones_with_it_and_no_earlier_one(tmp_path: Path) -> None:
    found = ledger(tmp_path)
    for stage in STAGES:
        found.finish(stage, {}, {"done": stage}, ())
    found.reopen("train")
    assert [stage for stage in STAGES if ledger(tmp_path).info(stage)] == ["dataset", "collect"]


def test_a_file_that_is_not_as_it_was_left_is_named(tmp_path: Path) -> None:
    found = ledger(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    found.finish("train", {name: digest_of(tmp_path / name) or "" for name in ("a", "b")}, {}, ())
    assert found.changed_file("train") is None
    (tmp_path / "b").write_text("other")
    assert found.changed_file("train") == "b"
    (tmp_path / "a").unlink()
    assert found.changed_file("train") == "a"


@pytest.mark.parametrize("change", [{"format_version": FORMAT_VERSION - 1}, {"more": 1}], ids=str)
def test_a_ledger_of_another_version_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    ledger(tmp_path)
    state = read_ledger(tmp_path)
    assert state is not None
    (tmp_path / LEDGER).write_bytes(msgpack.packb({**state, **change}))
    with pytest.raises(ConfigError, match=f"format version {FORMAT_VERSION}"):
        ledger(tmp_path)


def test_a_run_with_a_setting_that_was_removed_is_refused_by_its_name(tmp_path: Path) -> None:
    ledger(tmp_path)
    state = read_ledger(tmp_path)
    assert state is not None
    state["config"]["compare_steps"] = 100
    (tmp_path / LEDGER).write_bytes(msgpack.packb(state))
    with pytest.raises(ConfigError, match="another run directory: compare_steps was 100 and is None"):
        ledger(tmp_path)


IDENTITY = FACTS.identity
OTHERS = {
    "weights by their files": replace(FACTS, identity=replace(IDENTITY, weights_sha256="11")),
    "weights by their values": replace(FACTS, identity=replace(IDENTITY, weights_sample={"w": (1.0, 2.0)})),
    "tokenizer": replace(FACTS, identity=replace(IDENTITY, tokenizer_sha256="11")),
    "configuration": replace(FACTS, identity=replace(IDENTITY, config_sha256="11")),
    "dtype": replace(FACTS, identity=replace(IDENTITY, dtype="bfloat16")),
    "device": replace(FACTS, device="cuda"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_goes_on_with_no_other_model(tmp_path: Path, what: str) -> None:
    ledger(tmp_path, pipeline._model_record(FACTS))
    with pytest.raises(ConfigError, match="1 changes"):
        ledger(tmp_path, pipeline._model_record(OTHERS[what]))


def test_a_run_goes_on_with_the_same_model_under_another_name(tmp_path: Path) -> None:
    sampled = replace(IDENTITY, weights_sample={"b": (1.0,), "a": (2.0,)})
    again = replace(sampled, name="elsewhere", weights_sample={"a": (2.0,), "b": (1.0,)})
    ledger(tmp_path, pipeline._model_record(replace(FACTS, identity=sampled)))
    ledger(tmp_path, pipeline._model_record(replace(FACTS, identity=again)))


def test_a_taken_output_is_refused_unless_this_very_run_has_put_it_there(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "artefact"
    run.mkdir()
    check_output(output, run, force=False)
    output.mkdir()
    check_output(output, run, force=False)
    (output / "manifest.json").touch()
    check_output(output, run, force=True)
    found = ledger(run)
    for published in (None, tmp_path / "another"):
        if published is not None:
            found.record_publishing(published)
        with pytest.raises(ConfigError, match="a name that is free"):
            check_output(output, run, force=False)
    found.record_publishing(output)
    check_output(output, run, force=False)


def test_a_run_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder that can be written"), pipeline.locked(tmp_path / "file" / "run"):
        pass


def test_what_fails_under_the_lock_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError, match="of the disk"), locked(tmp_path):
        raise BlockingIOError("of the disk")
    with locked(tmp_path), pytest.raises(ConfigError, match="no other process"), locked(tmp_path):
        pass
