"""The stage that times what was published: what it adds to the report, and what is left when it does not end well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.calibration.test_pipeline import Killed, Spy
from tests.calibration.tiny_runs import contents, run_tiny
from tide_core.calibration import pipeline
from tide_core.calibration.collect.shards import TokenSequence, TokenShards, write_shard
from tide_core.calibration.report import report
from tide_core.calibration.report.data import Measured
from tide_core.calibration.stages import NEW_TOKENS, held_out_prompts
from tide_core.exits.artefact.artefact import load_artefact

BATCHES = (1, 2)
MEASURED = Measured({1: 1.5, 2: 1.25}, "one machine, float32", "batch 4 (90 s)")


class FakeTimer:
    """Returns a fixed answer and records its arguments."""

    def __init__(self, answer: Measured | BaseException = MEASURED) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.found: list[dict[str, bytes]] = []

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        identity: Any,
        artefact: Path,
        prompts: Sequence[Sequence[int]],
        **options: Any,
    ) -> Measured:
        self.asked.append({"prompts": [list(prompt) for prompt in prompts], **options})
        self.found.append(contents(artefact))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def measured_in(artefact: Path) -> list[str]:
    """The conditions of each series of timings in the report."""
    return [each["conditions"] for each in json.loads((artefact / "report.json").read_bytes())["measured"]]


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "can_plot", lambda: False)
        yield


def test_the_published_artefact_is_timed_and_its_report_written_again_under_the_same_digest(tmp_path: Path) -> None:
    timer = FakeTimer()

    result = run_tiny(tmp_path, timer=timer, measure_batches=BATCHES, measure_seconds=7.0)

    [asked], [found], after = timer.asked, timer.found, contents(result.artefact)
    assert (asked["batches"], asked["limit_s"], asked["new_tokens"]) == (BATCHES, 7.0, NEW_TOKENS)
    assert load_artefact(result.artefact, None).digest == result.digest
    assert found.keys() == after.keys()
    assert {name for name in found if found[name] != after[name]} == {"manifest.json", "report.md", "report.json"}
    assert b"nothing was timed yet" in found["report.md"]
    assert measured_in(result.artefact) == [MEASURED.conditions]
    assert result.verdict[-1].startswith("measured here: x1.50 at batch 1 (predicted x")
    assert result.verdict[-1].endswith("; left out: batch 4 (90 s)")
    assert MEASURED.conditions in result.report.read_text(encoding="utf-8")


def test_prompts_are_those_of_the_test_part_alone(tmp_path: Path) -> None:
    timer = FakeTimer()
    run_tiny(tmp_path, timer=timer, measure_batches=BATCHES, max_prompt_tokens=99)  # not cut to one beginning

    def prompts(part: str) -> list[list[int]]:
        shards = TokenShards(tmp_path / "run" / "shards", part)
        every = [shards.sequence(index) for index in range(shards.num_sequences)]
        return [each.tokens[: each.prompt_len].tolist() for each in every]

    asked = timer.asked[0]["prompts"]
    assert asked == prompts("test") != []
    assert not any(prompt in prompts("train") + prompts("calibration") for prompt in asked)


def test_prompts_with_answers_too_short_to_time_are_left_out_where_others_are_there(tmp_path: Path) -> None:
    lengths = {1: 9, 2: 5, 3: 8}  # of the answers, by the length of their prompts
    every = [TokenSequence(np.arange(p + a, dtype=np.int32), p) for p, a in lengths.items()]
    write_shard(tmp_path, "test", 0, every)
    shards = TokenShards(tmp_path, "test")

    assert [len(prompt) for prompt in held_out_prompts(shards, 8)] == [1, 3]
    assert [len(prompt) for prompt in held_out_prompts(shards, 99)] == [1, 2, 3]


@pytest.mark.parametrize("settings", [{"measure_batches": ()}, {"timer": None}], ids=str)
def test_without_batch_sizes_or_a_timer_nothing_is_timed(tmp_path: Path, settings: dict[str, Any]) -> None:
    timer = FakeTimer()

    result = run_tiny(tmp_path, **{"timer": timer, "measure_batches": BATCHES, **settings})

    assert timer.asked == []
    assert "nothing was timed yet" in result.report.read_text(encoding="utf-8")
    assert not any("measured" in line for line in result.verdict)


def test_a_finished_run_is_not_timed_again_and_keeps_its_bytes(tmp_path: Path) -> None:
    first = run_tiny(tmp_path, timer=FakeTimer(), measure_batches=BATCHES)
    before, timer, spy = contents(first.artefact), FakeTimer(), Spy()

    assert run_tiny(tmp_path, timer=timer, measure_batches=BATCHES, progress=spy) == first

    assert timer.asked == []
    assert "measure: done before" in spy.notes
    assert contents(first.artefact) == before


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(28, "No space left")], ids=repr)
def test_a_measurement_that_fails_leaves_a_whole_artefact_and_is_reported(tmp_path: Path, error: Exception) -> None:
    result = run_tiny(tmp_path, timer=FakeTimer(error), measure_batches=BATCHES)

    assert result.verdict[-1].startswith(f"not measured: {type(error).__name__}")
    assert "its report holds predictions only" in result.verdict[-1]
    assert load_artefact(result.artefact, None).digest == result.digest
    assert "nothing was timed yet" in result.report.read_text(encoding="utf-8")

    again = run_tiny(tmp_path, timer=FakeTimer(), measure_batches=BATCHES)
    assert again.verdict[-1].startswith("measured here: x1.50")


@pytest.mark.parametrize("when", ["timing", "ledger", "writing"])
def test_a_run_killed_after_publishing_is_whole_and_measures_on_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    killed: Any = FakeTimer(Killed()) if when == "timing" else FakeTimer()
    if when != "timing":

        def kill(*args: Any) -> None:
            raise Killed

        where = (Measured, "to_info") if when == "ledger" else (pipeline, "publish_measured")
        monkeypatch.setattr(*where, kill)
    spy = Spy()
    with pytest.raises(Killed):
        run_tiny(tmp_path, timer=killed, measure_batches=BATCHES, progress=spy)
    monkeypatch.undo()
    assert any(note.startswith("measure: interrupted; the artefact is published") for note in spy.notes)
    digest = load_artefact(tmp_path / "artefact", None).digest
    assert measured_in(tmp_path / "artefact") == []

    timer = FakeTimer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "can_plot", lambda: False)
        result = run_tiny(tmp_path, timer=timer, measure_batches=BATCHES)
    assert len(timer.asked) == (0 if when == "writing" else 1), "what is in the ledger is not timed again"
    assert result.digest == digest
    assert measured_in(result.artefact) == [MEASURED.conditions]


def test_other_exits_are_timed_anew(tmp_path: Path) -> None:
    run_tiny(tmp_path, timer=FakeTimer(), measure_batches=BATCHES)
    (tmp_path / "run" / "train" / "candidates.safetensors").unlink()
    timer = FakeTimer()

    run_tiny(tmp_path, timer=timer, measure_batches=BATCHES)

    assert len(timer.asked) == 1
