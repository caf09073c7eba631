"""The benchmark of the modes on a tiny model: every part runs, and a missed bar is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from benchmarks.common.bars import Bar, Part
from benchmarks.common.prompts import Prompt, different_kinds
from benchmarks.common.runs import Bench, greedy, output_ids
from benchmarks.modes import __main__ as modes
from benchmarks.modes import parts as mode_parts
from tests.evaluation.on_disk import PROMPTS, save_artefact_for_it, save_model
from tide_core.config import EngineConfig

SMALL = "--tokens 8 --repeats 2 --prompts 2 --identity 5 --identity-tokens 8 --quality 3 --batch 2 --batches 2,4"
NEEDLES = "--needles 3 --mates 4 --needle-tokens 6"


@pytest.fixture(scope="module", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bench")
    prompts = root / "prompts.jsonl"
    lines = [{"prompt": text, "kind": kind} for text, kind in zip(PROMPTS, "aabbcc", strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"model": save_model(root / "m"), "artefact": save_artefact_for_it(root / "a"), "prompts": prompts}


@pytest.fixture
def run(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    def main(options: str) -> tuple[int, str, str]:
        where = ["--model", str(folders["model"]), "--artefact", str(folders["artefact"]), "--device", "cpu"]
        where += ["--prompt-file", str(folders["prompts"])]
        code = modes.main([*where, *SMALL.split(), *NEEDLES.split(), *options.split()])
        return code, *capsys.readouterr()

    return main


@pytest.fixture(scope="module")
def bench(folders: dict[str, Path]) -> Any:
    config = EngineConfig(
        model=str(folders["model"]), artefact=str(folders["artefact"]), device="cpu", prefix_caching=False
    )
    bench = Bench(config, folders["prompts"])
    with bench.engine:
        yield bench


def test_every_part_runs_and_the_report_has_all_conditions(run: Any) -> None:
    code, out, err = run("--json --no-bars")
    assert code == 0
    report = json.loads(out)
    conditions = report["conditions"]
    for name in ("command", "model", "artefact", "hardware", "dtype", "device", "threads", "new_tokens", "repeats"):
        assert conditions[name], name
    assert conditions["sizes"]["batches"] == [2, 4]
    assert [name[0] for name in report["parts"]] == ["a", "b", "c", "e", "f"]
    clock = report["parts"]["a, c, d by the clock: batch 1"]
    assert {"full", "verified", "bounded", "fast", "no exits"} <= clock.keys()
    assert len(clock["verified"]["of_each_repeat"]) == 2
    assert clock["no exits"]["layers_per_token"] == 4.0
    same = [bar for bar in report["bars"] if "equals full" in bar["name"]]
    assert len(same) == 4
    assert all(bar["holds"] for bar in same), "exact by construction, whatever the speed"
    needles = next(bar for bar in report["bars"] if bar["name"] == "mismatches alone and among mates")
    assert needles["holds"]
    of_bounded = [
        bar for bar in report["bars"] if "budget" in bar["name"] or "kept" in bar["name"] or "say" in bar["name"]
    ]
    assert len(of_bounded) == 3
    assert all(bar["holds"] for bar in of_bounded), "by construction"
    assert "by the clock" in err
    assert all(part["seconds"] > 0 for part in report["parts"].values())


def test_only_the_requested_parts_run(run: Any) -> None:
    code, out, _ = run("--parts f --no-bars")
    assert code == 0
    assert "f: 3 prompts alone and among 1-4 mates" in out
    assert "by the clock" not in out
    assert "b: " not in out


def test_a_missed_bar_is_reported_and_ends_with_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_parts, "SPEEDUP", {"cpu": 1e9})
    code, out, _ = run("--parts a")
    assert code == 1
    assert "MISS verified over full, batch 1" in out
    assert "ok   verified equals full, batch 1" in out


def test_an_unknown_part_is_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--parts a,x")
    assert "unknown x" in capsys.readouterr().err


def test_help_needs_no_model() -> None:
    command = [sys.executable, "-m", "benchmarks.modes", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "--identity" in done.stdout


def test_the_library_agrees_with_the_engine_and_detects_a_changed_token(bench: Bench) -> None:
    prompt = bench.prompts[0]
    [answer] = bench.run([prompt], greedy("full", 12))
    output = output_ids(answer)
    assert bench.library.score(prompt, output).agreed(output) == (True,) * 12
    output[5] += 1
    assert bench.library.score(prompt, output).agreed(output)[:6] == (True,) * 5 + (False,)


def test_a_difference_is_a_tie_only_by_the_logits(bench: Bench) -> None:
    prompts = bench.prompts[:2]
    full = bench.run(prompts, greedy("full", 8))
    changed = [full[1], full[0]]
    part = Part("b")
    mode_parts._add_differences(part, bench, prompts, full, changed, "same")
    assert len(part.data["differences"]) == 2
    for difference, prompt, answer in zip(part.data["differences"], prompts, full, strict=True):
        at = difference["position"]
        assert difference["logit_gap"] == bench.library.gap(
            [*prompt.ids, *output_ids(answer)[:at]], difference["tokens"]
        )
    assert not part.bars[0].holds


def test_fixed_drafts_and_untied_rows_are_undone(bench: Bench) -> None:
    core, planner = bench.parts.core, bench.planner
    before = planner.table, planner.max_drafts, core.scheduler.max_batch_tokens
    with bench.fixed_drafts(2) as drafts, bench.untied_rows():
        assert drafts == planner.plan(50, 50).drafts == 2
    assert before == (planner.table, planner.max_drafts, core.scheduler.max_batch_tokens)


def test_prompts_are_taken_from_all_kinds_and_all_of_the_file(bench: Bench) -> None:
    assert [prompt.kind for prompt in different_kinds(bench.prompts, 4)] == ["a", "b", "c", "a"]
    assert [prompt.kind for prompt in bench.spread(3)] == ["a", "b", "c"]
    assert len(bench.spread(100)) == 6
    assert different_kinds([Prompt("a", (1,))], 5) == [Prompt("a", (1,))]


def test_a_bar_holds_at_its_limit_and_not_past_it() -> None:
    assert Bar("speed", 1.5, 1.5).holds
    assert not Bar("speed", 1.49, 1.5).holds
    assert Bar("wrong", 0.02, 0.02, at_least=False).holds
    assert not Bar("wrong", 0.021, 0.02, at_least=False).holds
