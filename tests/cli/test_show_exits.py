"""`tide generate --show-exits`: where each piece of text was decided, and what that was worth."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_engine import USAGE, FakeEngine
from tests.engine.exit_engines import exit_engine
from tests.factories import make_engine, make_parts
from tide_core.cli import exit_report
from tide_core.engine.engine import Engine
from tide_core.request import Audit, FinishReason, RequestOutput, TokenOutput

Tide = Callable[..., tuple[int, str, str]]
UseEngine = Callable[..., Any]
OPTIONS = ("--max-tokens", "24", "--ignore-eos")
SPEED = re.compile(
    r"^tide: (\w+) ([\d.]+) tok/s, full depth ([\d.]+) tok/s: ([\d.]+)x, output identical$", re.MULTILINE
)

TOKENS = (
    TokenOutput(5, "The", 4),
    TokenOutput(6, " cat", 1, score=0.9, audit=Audit.AGREED, mode="bounded"),
    TokenOutput(7, " sat", 1, score=0.8, audit=Audit.AGREED, mode="bounded"),
    TokenOutput(8, " mat", 1, score=0.7, audit=Audit.DISAGREED, mode="bounded"),
    TokenOutput(9, "", 4),
    TokenOutput(10, "\n", 4),
)


def scripted(use_engine: UseEngine) -> FakeEngine:
    engine: FakeEngine = use_engine([[RequestOutput("r", TOKENS, FinishReason.LENGTH, USAGE)]])
    engine.default_mode = "verified"
    return engine


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_on_a_pipe_the_layer_stands_in_brackets_where_it_changes(tide: Tide, use_engine: UseEngine) -> None:
    scripted(use_engine)
    code, out, _ = tide("generate", "Say", "--show-exits", "--mode", "bounded")
    assert (code, out) == (0, "[4]The[1] cat sat[1!] mat[4]\n")


def test_on_a_terminal_each_layer_has_a_colour_and_the_legend_too(
    tide: Tide, use_engine: UseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(use_engine)
    on_terminal(monkeypatch)
    code, out, err = tide("generate", "Say", "--show-exits", "--mode", "bounded")
    assert code == 0
    assert out == "The\033[32m cat\033[0m\033[32m sat\033[0m\033[32;7m mat\033[0m\n\n"
    assert "\033[32mlayer 1\033[0m: 3 (50.0%), all 4 layers: 3 (50.0%)" in err


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_brackets(
    tide: Tide, use_engine: UseEngine, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    scripted(use_engine)
    on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert "\033" not in "".join(tide("generate", "Say", "--show-exits")[1:])


def test_answers_of_a_file_are_marked_each_for_itself(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    scripted(use_engine)
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    code, out, err = tide("generate", "--file", str(file), "--show-exits")
    assert (code, out) == (0, "".join(f"=== {n} ===\n[4]The[1] cat sat[1!] mat[4]\n" for n in (1, 2)))
    assert "6.00 tokens per deep pass, 1.2 layers run per token, 2 of 6 drafts accepted (33.3%)" in err
    assert "audits: verified 6, agreed 4, disagreed 2" in err


def test_without_the_option_nothing_is_marked_measured_or_run_twice(tide: Tide, use_engine: UseEngine) -> None:
    engine = scripted(use_engine)
    assert tide("generate", "Say") == (0, "The cat sat mat\n", "")
    assert len(engine.params) == 1


def test_the_speed_up_is_the_ratio_of_two_runs_and_both_are_made(
    tide: Tide, use_engine: UseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = use_engine(exit_engine())
    asked: list[tuple[str | None, int]] = []
    stream = engine.stream_blocking

    def counted(prompt: Any, params: Any) -> Any:
        asked.append((params.mode, params.max_tokens))
        return stream(prompt, params)

    monkeypatch.setattr(engine, "stream_blocking", counted)
    code, out, err = tide("generate", "the cat sat on the mat", "--show-exits", *OPTIONS)
    assert code == 0
    assert asked == [("verified", 4), ("full", 4), (None, 24), ("full", 24)]
    assert {"[1]", "[4]"} <= set(re.findall(r"\[\d\]", out))
    [(mode, rate, full_rate, ratio)] = SPEED.findall(err)
    assert mode == "verified"
    assert float(ratio) == pytest.approx(float(rate) / float(full_rate), rel=0.02)
    assert "audits: verified 24" in err


def test_a_run_that_takes_twice_as_long_at_full_depth_is_a_speed_up_of_two(
    tide: Tide, use_engine: UseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted(use_engine)
    now, stream = 0.0, engine.stream_blocking

    def timed(prompt: Any, params: Any) -> Any:
        nonlocal now
        now += 1.0 if params.mode == "full" else 0.5
        yield from stream(prompt, params)

    monkeypatch.setattr(engine, "stream_blocking", timed)
    monkeypatch.setattr(exit_report.time, "monotonic", lambda: now)
    _, _, err = tide("generate", "Say", "--show-exits")
    assert "tide: verified 12.0 tok/s, full depth 6.0 tok/s: 2.00x, output identical\n" in err


def test_a_batch_of_prompts_is_compared_as_a_batch(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    use_engine(exit_engine())
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\nthe dog\nthe log\n")
    code, out, err = tide("generate", "--file", str(file), "--show-exits", *OPTIONS)
    assert (code, out.count("===")) == (0, 6)
    assert SPEED.search(err)
    assert "audits: verified 72" in err


def test_an_output_that_differs_from_full_depth_is_said_to(tide: Tide, use_engine: UseEngine) -> None:
    use_engine(exit_engine(easy=False))
    _, _, err = tide("generate", "the cat", "--mode", "fast", "--threshold", "0", "--show-exits", *OPTIONS)
    assert re.search(r"fast [\d.]+ tok/s, full depth [\d.]+ tok/s: [\d.]+x, output differs", err)
    assert "unaudited" in err


def test_sampled_outputs_are_not_compared(tide: Tide, use_engine: UseEngine) -> None:
    use_engine(exit_engine())
    _, _, err = tide("generate", "the cat", "--temperature", "1", "--seed", "3", "--show-exits", *OPTIONS)
    assert "sampled, so outputs are not compared" in err


@pytest.mark.parametrize("args", [("--mode", "full"), ()], ids=["asked for", "no artefact"])
def test_full_depth_is_not_compared_with_itself(tide: Tide, use_engine: UseEngine, args: tuple[str, ...]) -> None:
    use_engine(make_engine())
    code, out, err = tide("generate", "the cat", "--show-exits", *OPTIONS, *args)
    assert code == 0
    assert out.startswith("[4]")
    assert "all 4 layers: 24 (100.0%)" in err
    assert "full depth" not in err


def test_a_model_without_an_artefact_is_compared_where_it_has_suffix_drafts(tide: Tide, use_engine: UseEngine) -> None:
    use_engine(Engine.from_parts(replace(make_parts(), suffix_drafts=True)))
    code, _, err = tide("generate", "the cat", "--show-exits", *OPTIONS)
    assert code == 0
    assert [found[0] for found in SPEED.findall(err)] == ["verified"]


def test_quiet_means_no_second_run(tide: Tide, use_engine: UseEngine) -> None:
    engine = scripted(use_engine)
    code, out, err = tide("generate", "Say", "--show-exits", "--quiet")
    assert (code, out[:3], err) == (0, "[4]", "")
    assert len(engine.params) == 1


def test_json_lines_carry_exits_and_end_with_the_comparison(tide: Tide, use_engine: UseEngine) -> None:
    use_engine(exit_engine())
    code, out, err = tide("generate", "the cat sat on the mat", "--show-exits", "--json", *OPTIONS)
    *tokens, final, comparison = (json.loads(line) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert {token["exit_layer"] for token in tokens} == {1, 4}
    assert {(token["audit"], token["mode"]) for token in tokens} == {("verified", "verified")}
    assert all(0 <= token["score"] <= 1 for token in tokens if token["exit_layer"] == 1)
    exits = final["exits"]
    assert sum(exits["by_layer"].values()) == len(tokens) == 24
    assert exits["accepted"] <= exits["drafts"]
    assert exits["tokens_per_deep_pass"] == pytest.approx(24 / exits["deep_passes"], abs=1e-3)
    assert final["mode"] == comparison["mode"] == "verified"
    assert (comparison["type"], comparison["identical"]) == ("comparison", True)
    assert comparison["speedup"] == pytest.approx(
        comparison["tokens_per_s"] / comparison["full_tokens_per_s"], rel=1e-2
    )


def test_the_warm_up_leaves_nothing_of_the_prompt_in_the_cache(tide: Tide, use_engine: UseEngine) -> None:
    use_engine(exit_engine())
    prompt = "the cat sat on the mat and the dog sat on the log, then they all went home " * 2
    _, out, _ = tide("generate", prompt, "--show-exits", "--json", *OPTIONS)
    final = json.loads(out.splitlines()[-2])
    assert final["usage"]["prompt_tokens"] >= 32
    assert final["usage"]["cached_tokens"] == 0


def test_a_failed_full_depth_run_prints_no_speed_up(tide: Tide, use_engine: UseEngine) -> None:
    engine = scripted(use_engine)
    whole = engine._script[0]
    engine._script = [whole, whole, whole, [RequestOutput("r", (), FinishReason.ERROR, None, ValueError("no"))]]
    code, _, err = tide("generate", "Say", "--show-exits")
    assert code == 1
    assert "tok/s" not in err
