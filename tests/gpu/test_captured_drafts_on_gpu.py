"""Drafting as graphs: replays say what the same passes say op by op."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import random_prompts
from tide_core.engine.assemble import Parts
from tide_core.execution.graphs.drafts import CapturedDrafts
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
HEAD = (("head_size", 16), ("num_heads", 4), ("num_kv_heads", 2))
BLOCK = {"kind": "block", "taps": (2, 3), "sizes": HEAD, "draft_threshold": 0.0}
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(max_tokens=24, ignore_eos=True, mode="fast", threshold=0.3),
]


def captured_parts(artefact: dict[str, Any], *, capture: bool) -> Parts:
    parts = exit_parts("qwen3", easy=False, artefact=artefact, device="cuda", dtype="bfloat16", max_rows=8)
    runner = parts.runner
    runner._cycles = None  # it would take every greedy row
    drafter, exits = runner._drafter, runner.exits
    assert drafter is not None
    assert exits is not None
    assert drafter._captured is not None, "a model of this shape is captured"
    if not capture:
        first = runner.segments[0]
        drafter._captured = CapturedDrafts(runner.adapter, runner.cache, runner.kernels, exits, first, capture=False)
    return parts


@pytest.mark.parametrize("artefact", [BLOCK, {"kind": "mlp", "draft_threshold": 0.0}], ids=["block", "mlp"])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn", "fast"])
@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_replayed_passes_draft_what_the_same_passes_draft_op_by_op(
    artefact: dict[str, Any], params: SamplingParams, num_rows: int
) -> None:
    answers = []
    for capture in (False, True):
        parts = captured_parts(artefact, capture=capture)
        with poisoned(parts) as engine:
            answers.append(engine.generate(random_prompts(num_rows, 11), params))
            again = engine.generate(random_prompts(num_rows, 11), params)  # every pass is a replay now
        assert all_ids(again) == all_ids(answers[-1])
    plain, replayed = answers
    assert all_ids(replayed) == all_ids(plain)
    assert [exit_layers(answer) for answer in replayed] == [exit_layers(answer) for answer in plain]
    for one, other in zip(replayed, plain, strict=True):
        for token, twin in zip(one.tokens, other.tokens, strict=True):
            assert token.score == (None if twin.score is None else pytest.approx(twin.score, abs=1e-3))


def test_rows_that_draft_together_come_in_few_shapes() -> None:
    parts = captured_parts(BLOCK, capture=True)
    with poisoned(parts) as engine:
        engine.generate(random_prompts(2, 120), SamplingParams(max_tokens=40, ignore_eos=True))
    drafter = parts.runner._drafter
    assert drafter is not None
    assert drafter._captured is not None
    shapes = list(drafter._captured._passes._by_shape)
    assert 2 in {room.tokens for room, _ in shapes} <= {1, 2}
    assert len(shapes) <= 16
