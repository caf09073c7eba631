"""The measured cost table: what is timed, what stays afterwards, and how it is stored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.engine.exit_engines import exit_parts, ids
from tests.factories import random_prompts
from tide_core.batch import ScheduledBatch, StepResult
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Engine
from tide_core.execution import cost_measure
from tide_core.execution.cost_measure import cache_path, measure, read_table, typical, write_table
from tide_core.execution.runner import ModelRunner
from tide_core.exits.cost import CostTable
from tide_core.request import SamplingParams

SETTINGS: dict[str, Any] = {"max_rows": 4, "artefact": {"kind": "block"}, "kv_memory_gib": 0.02}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[CostTable]:
    """Every table measured by a starting engine."""
    seen: list[CostTable] = []

    def counting(*args: Any, **kwargs: Any) -> CostTable:
        seen.append(measure(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(assemble, "measure", counting)
    return seen


def idle_parts(**settings: Any) -> Parts:
    return exit_parts(**{**SETTINGS, "drafts": 4, **settings})


def measured(parts: Parts, **settings: Any) -> CostTable:
    blocks = parts.core.scheduler.blocks
    return measure(parts.runner, blocks, **{"max_rows": 4, "max_drafts": 4, "context": 32, **settings})


@pytest.mark.parametrize("artefact", [{"kind": "block"}, {"kind": "identity", "layers": (1, 3)}], ids=["block", "two"])
def test_a_table_has_a_point_for_each_number_of_rows_and_times_for_some_drafts(artefact: dict[str, Any]) -> None:
    table = measured(idle_parts(artefact=artefact))
    assert [point.rows for point in table.points] == [1, 2, 4]
    for point in table.points:
        assert [drafts for drafts, _ in point.cycle_s] == [0, 1, 2, 4]
        assert all(0.0 < seconds < 60.0 for seconds in (point.full_s, *(s for _, s in point.cycle_s)))


def test_what_is_timed_are_cycles_of_exactly_that_many_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, int, bool]] = set()
    run = ModelRunner.run

    def watching(self: ModelRunner, batch: ScheduledBatch) -> StepResult:
        result = run(self, batch)
        for step, row in zip(batch.rows, result.rows, strict=True):
            assert row.counts[0].drafted == step.num_drafts, "every draft that is paid for is made"
            assert step.start == 32
            seen.add((len(batch.rows), step.num_drafts, step.policy.may_exit))
        return result

    monkeypatch.setattr(ModelRunner, "run", watching)
    measured(idle_parts(), max_rows=2)
    drafts = {(rows, drafts, True) for rows in (1, 2) for drafts in (0, 1, 2, 4)}
    assert seen == drafts | {(1, 0, False), (2, 0, False)}


def test_the_pool_is_idle_afterwards_and_answers_are_as_without_a_measurement() -> None:
    prompts = random_prompts(4, 9)
    params = SamplingParams(max_tokens=16, ignore_eos=True, mode="verified")
    with Engine.from_parts(idle_parts()) as engine:
        expected = [ids(answer) for answer in engine.generate(prompts, params)]
    parts = idle_parts()
    measured(parts)
    parts.core.check_idle()
    assert parts.core.scheduler.blocks.num_owned == len(parts.core.scheduler.blocks._cached) == 0
    with Engine.from_parts(parts) as engine:
        assert [ids(answer) for answer in engine.generate(prompts, params)] == expected


def test_the_pool_is_idle_even_if_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = idle_parts()

    def fail(self: ModelRunner, batch: ScheduledBatch) -> StepResult:
        raise RuntimeError("no")

    monkeypatch.setattr(ModelRunner, "run", fail)
    with pytest.raises(RuntimeError, match="no"):
        measured(parts)
    parts.core.check_idle()


def test_rows_that_the_pool_cannot_hold_are_left_out() -> None:
    parts = idle_parts(kv_memory_gib=0.001)
    blocks = parts.core.scheduler.blocks
    context = blocks.num_blocks * blocks.block_size // 2 - blocks.block_size
    assert measured(parts, context=context).max_rows == 2
    assert measured(parts, context=10 * context).points, "a context longer than the model or the pool is cut to it"
    parts.core.check_idle()


def test_a_measurement_that_takes_too_long_stops_at_fewer_rows_but_has_one() -> None:
    assert measured(idle_parts(), limit_s=0.0).max_rows == 1


def test_a_starting_engine_measures_once_and_the_next_one_reads_the_table(
    cache_dir: Path, measurements: list[CostTable]
) -> None:
    settings = {**SETTINGS, "drafts": None}
    first, second = exit_parts(**settings), exit_parts(**settings)
    [table] = measurements
    assert first.planner is not None
    assert first.planner.table == table
    assert second.planner is not None
    assert second.planner.table == table
    assert len(list((cache_dir / "costs").iterdir())) == 1


def test_a_table_of_other_settings_is_not_taken(measurements: list[CostTable]) -> None:
    for changes in ({}, {"max_rows": 2}, {"max_pending": 2}, {"artefact": {"kind": "affine"}}):
        exit_parts(**{**SETTINGS, "drafts": None, **changes})
    assert len(measurements) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"points": []}',
        '{"points": [{"rows": 1}]}',
        '{"points": [{"rows": 1, "full_s": -1, "cycle_s": [[0, 1]]}]}',
        '{"points": [{"rows": 1, "full_s": NaN, "cycle_s": [[0, 1]]}]}',
        '{"points": [{"rows": 1, "full_s": 1, "cycle_s": [[0, 1e99]]}]}',
        '{"points": [{"rows": 1, "full_s": 1, "cycle_s": []}]}',
        '{"points": [{"rows": 4, "full_s": 1, "cycle_s": [[0, 1]]}, {"rows": 4, "full_s": 1, "cycle_s": [[0, 1]]}]}',
    ],
)
def test_a_table_that_cannot_be_read_is_measured_again(
    text: str, cache_dir: Path, measurements: list[CostTable], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SETTINGS, "max_rows": 1, "drafts": None}
    exit_parts(**settings)
    [path] = (cache_dir / "costs").iterdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="tide"):
        parts = exit_parts(**settings)
    assert len(measurements) == 2
    assert "measured again" in caplog.text
    assert parts.planner is not None
    assert parts.planner.table == measurements[1] == read_table(path)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = measured(idle_parts())
    path = cache_path(tmp_path, {"host": "here"})
    write_table(path, table, {"host": "here"})
    assert read_table(path) == table
    assert json.loads(path.read_text())["facts"] == {"host": "here"}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "no temporary file is left"
    assert cache_path(tmp_path, {"host": "there"}) != path
    assert read_table(tmp_path / "nothing") is None


def test_a_cache_that_cannot_be_written_costs_a_warning_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="tide"):
        parts = exit_parts(**{**SETTINGS, "drafts": None})
    assert parts.planner is not None
    assert parts.planner.table is not None
    assert "cannot be kept" in caplog.text


def test_a_fixed_number_of_drafts_needs_no_table(measurements: list[CostTable]) -> None:
    parts = exit_parts(**{**SETTINGS, "drafts": 3})
    assert measurements == []
    assert parts.planner is not None
    assert parts.planner.table is None


def test_the_rows_that_are_measured_rise_from_one() -> None:
    assert cost_measure.ROWS[0] == 1
    assert list(cost_measure.ROWS) == sorted(set(cost_measure.ROWS))


def test_a_try_that_was_disturbed_does_not_count_nor_one_that_came_out_too_short_by_the_clock_of_a_device() -> None:
    assert typical([3.0, 2.0, 9.0], by_device=False) == 2.0
    assert typical([3.0, 0.1, 2.9, 9.0, 3.1], by_device=True) == 3.0
