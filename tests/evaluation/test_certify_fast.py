"""Contracts of mode fast from a calibration to a served request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.calibration.tiny_runs import run_tiny
from tests.engine.exit_engines import exit_parts
from tests.factories import random_prompts
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.risk.certify import Goal
from tide_core.engine.engine import Engine
from tide_core.evaluation.certify_fast import answers_at, certify_fast
from tide_core.evaluation.full_depth import FullDepth
from tide_core.evaluation.speedup import time_exits
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.request import SamplingParams

LADDER: dict[str, Any] = {"kind": "identity", "fast_layers": (2, 3), "draft_threshold": 0.0, "shake": 0.0}
PROMPTS = random_prompts(6, 9)


def test_an_answer_is_compared_with_what_full_depth_would_have_chosen_at_every_place() -> None:
    parts = exit_parts(artefact=LADDER, audit_share=0.0)
    full, fast = (
        SamplingParams(max_tokens=12, mode=mode, threshold=at) for mode, at in (("full", None), ("fast", 0.4))
    )
    with Engine.from_parts(parts) as engine:
        found = answers_at(engine, FullDepth(parts.runner.adapter, parts.kernels), PROMPTS, 0.4, 12)
        for prompt, answer, judged in zip(PROMPTS, engine.generate(PROMPTS, fast), found, strict=True):
            tokens = [token.token_id for token in answer.tokens]
            expected = 0
            for place, token in enumerate(tokens):
                [again] = engine.generate([[*prompt, *tokens[:place]]], full)
                expected += again.tokens[0].token_id != token
            assert (judged.num_tokens, judged.num_differing) == (len(tokens), expected)
    assert any(each.num_differing for each in found)
    assert all(each.layers_per_token < 4 for each in found)


def test_what_always_agrees_is_certified_and_what_never_does_is_not() -> None:
    many = random_prompts(90, 7)
    for share, certified in ((0.0, True), (1.0, False)):
        parts = exit_parts(artefact=LADDER, audit_share=0.0, share=share)
        goal = Goal((0.1,), 0.05, 6, many[:10], many, 3)
        with Engine.from_parts(parts) as engine:
            got = certify_fast(engine, parts, goal, SilentProgress())
        assert bool(got.contracts) is certified
        assert got.tried


def test_a_calibration_publishes_fast_exits_and_what_was_tried(tmp_path: Path) -> None:
    result = run_tiny(
        tmp_path, timer=time_exits, measure_batches=(1,), measure_seconds=600.0, fast_answers=4, fast_tokens=4
    )
    artefact = load_artefact(result.artefact, None)
    assert artefact.digest == result.digest
    assert artefact.manifest.fast is not None
    assert artefact.fast is not None
    assert artefact.manifest.checkpoints[0].fast is None
    report = json.loads((result.artefact / "report.json").read_bytes())
    certified = report["measured"][0]["certified"]
    assert len(certified["contracts"]) == len(artefact.manifest.fast.contracts)
    assert {each["epsilon"] for each in certified["tried"]} == {0.05, 0.1}
    assert "exit after layer" in result.report.read_text(encoding="utf-8")


def test_without_steps_for_them_there_are_no_fast_exits(tmp_path: Path) -> None:
    artefact = load_artefact(run_tiny(tmp_path, fast_steps=0).artefact, None)
    assert artefact.manifest.fast is None
    assert artefact.fast is None
