"""The clock at the end of a calibration: same prompts, turns within one engine, and a limit that is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import easy_model
from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import random_prompts, tiny_tokenizer
from tide_core import __version__
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.report.data import Measured
from tide_core.engine import assemble
from tide_core.engine.engine import Engine
from tide_core.errors import ConfigError, EngineError
from tide_core.evaluation import speedup
from tide_core.evaluation.speedup import REPEATS, time_exits
from tide_core.exits.cost import CostPoint, CostTable
from tide_core.models.identity import identify

TOKENS = 8


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits") / "artefact"
    return make_artefact(folder, easy_model(), kind="identity", shortlist_size=380)


@pytest.fixture(autouse=True)
def _quick_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay, and a step takes a millisecond for each row."""
    points = tuple(CostPoint(rows, rows * 1e-3, ((0, rows * 1e-3), (6, rows * 1.2e-3))) for rows in (1, 8))
    monkeypatch.setattr(assemble, "measure", lambda *args, **options: CostTable(points))
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """Every call of the engine: mode, tokens, prompts."""
    seen: list[tuple[str, int, tuple[tuple[int, ...], ...]]] = []
    generate = Engine.generate

    def spied(self: Engine, prompts: Any, params: Any = None) -> Any:
        seen.append((params.mode, params.max_tokens, tuple(map(tuple, prompts))))
        return generate(self, prompts, params)

    monkeypatch.setattr(Engine, "generate", spied)
    return seen


def timed(artefact: Path, prompts: Any = None, **options: Any) -> Measured:
    model, tokenizer = copy.deepcopy(easy_model()), tiny_tokenizer()
    given: dict[str, Any] = {"batches": (1, 2), "new_tokens": TOKENS, "limit_s": 600.0, **options}
    prompts = random_prompts(12, 20) if prompts is None else prompts
    return time_exits(
        model, tokenizer, identify(model, tokenizer, None), artefact, prompts, progress=SilentProgress(), **given
    )


def test_every_batch_size_has_a_ratio_and_the_conditions_are_stated(artefact: Path) -> None:
    measured = timed(artefact)

    assert list(measured.speedups) == [1, 2]
    assert all(0.05 < ratio < 20 for ratio in measured.speedups.values())
    for expected in (
        "float32",
        "LlamaForCausalLM",
        "mode `verified` over mode `full`",
        f"{TOKENS} new tokens",
        f"median of {REPEATS}",
        "12 to take from",
        "9 of 9 answers equal",
        f"tide-serve {__version__}",
        f"torch {torch.__version__}",
    ):
        assert expected in measured.conditions
    assert measured.left_out == ""


def test_modes_take_turns_on_the_same_prompts_and_each_repeat_has_its_own(artefact: Path, runs: Any) -> None:
    timed(artefact, batches=(2,))

    clocked = [run for run in runs if run[1] == TOKENS]
    assert [mode for mode, _, _ in clocked] == ["full", "verified", "verified", "full", "full", "verified"]
    groups = [clocked[at][2] for at in (0, 2, 4)]
    assert [clocked[at][2] for at in (1, 3, 5)] == groups
    assert all(len(group) == 2 for group in groups)
    assert len({prompt for group in groups for prompt in group}) == 6
    for mode in ("full", "verified"):  # each has its prompts cached before the clock starts
        assert [run[2] for run in runs if run[:2] == (mode, speedup.WARM_UP_TOKENS)] == groups


def test_the_median_ratio_is_stated(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"full": iter([0, 8.0, 0, 6.0, 0, 9.0]), "verified": iter([0, 4.0, 0, 4.0, 0, 3.0])}
    monkeypatch.setattr(speedup, "_timed", lambda engine, group, mode, tokens: (next(seconds[mode]), []))

    assert timed(artefact, batches=(1,)).speedups == {1: 2.0}


def test_a_batch_size_that_cannot_be_done_in_time_is_not_begun_and_named(
    artefact: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tuple(CostPoint(rows, seconds, ((0, seconds),)) for rows, seconds in ((1, 1e-3), (8, 10.0)))
    monkeypatch.setattr(assemble, "measure", lambda *args, **options: CostTable(slow))
    measured = timed(artefact, batches=(8, 1), limit_s=60.0)

    assert list(measured.speedups) == [1]
    assert "batch 8 (it needs 5" in measured.left_out  # 1.2 * 3 * 2 modes * 8 tokens * 10 s, and prompts
    assert {len(prompts) for _, _, prompts in runs} == {1}


def test_where_not_even_one_row_can_be_done_no_engine_is_started(
    artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedup, "_step_seconds", lambda model: 3.0)
    monkeypatch.setattr(assemble, "assemble_loaded", pytest.fail)

    measured = timed(artefact, limit_s=60.0)

    assert measured.speedups == {}
    assert measured.left_out == "a step takes 3 s, so that nothing could be timed in 60 s"


def test_a_batch_that_the_pool_cannot_hold_is_left_out(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedup, "KV_MEMORY_GIB", 1e-4)

    assert "batch 8 (more than 0.0001 GiB of KV memory)" in timed(artefact, batches=(1, 8)).left_out


def test_few_prompts_come_again_and_prompts_too_long_are_not_used(artefact: Path, runs: Any) -> None:
    short, long = random_prompts(1, 5)[0], [2] * 250

    assert list(timed(artefact, [long, short], batches=(2,)).speedups) == [2]
    assert {prompt for _, _, prompts in runs for prompt in prompts} == {tuple(short)}
    with pytest.raises(ConfigError, match="held-out prompts"):
        timed(artefact, [long])


def test_an_answer_that_fails_ends_the_measurement(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_core.execution.runner import ModelRunner

    def fail(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ModelRunner, "_verify", fail)
    with pytest.raises(EngineError, match=r"mode full: .*no"):
        timed(artefact)
