"""Cycles as graphs with sampled rows and rows that adjust logits, want log-probabilities or follow a grammar, against
the same passes op by op and against the plain path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, poisoned
from tests.factories import random_prompts
from tests.gpu.test_cycles_on_gpu import BLOCK, cycle_parts
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import Launched
from tide_core.request import Grammar, SamplingParams

pytestmark = pytest.mark.gpu
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.8, "mode": "full"},
    {"temperature": 0.8, "threshold": 0.5},
    {"threshold": 0.5},
    {"logprobs": 3},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {7: 3.0, 11: -100.0}},
    {"min_tokens": 20, "stop_ids": tuple(range(2, 150))},
    {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 2, "top_k": 30},
    {"grammar": Grammar("regex", r"([a-f]{2,5}, ?){8,}[0-9]{6}")},
    {"grammar": Grammar("regex", "[a-z ,.]{60,}"), "presence_penalty": 0.5, "logprobs": 2},
    {"grammar": Grammar("regex", "[a-z ,.]{60,}"), "temperature": 0.8, "top_p": 0.9},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_replayed_cycle_draws_what_its_passes_draw_op_by_op(
    kind: dict[str, Any], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    start = GraphCycles.start

    def counted(self: GraphCycles, rows: Any, **how: Any) -> Launched:
        taken.append(len(rows))
        return start(self, rows, **how)

    monkeypatch.setattr(GraphCycles, "start", counted)
    params, answers = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, **kind), []
    for capture in (False, True):
        with poisoned(cycle_parts(BLOCK, capture=capture)) as engine:
            answers.append(engine.generate(random_prompts(num_rows, 11), params))
            again = engine.generate(random_prompts(num_rows, 11), params)  # every cycle is a replay now
        assert all_ids(again) == all_ids(answers[-1])
    plain, replayed = answers
    assert all_ids(replayed) == all_ids(plain)
    assert [exit_layers(answer) for answer in replayed] == [exit_layers(answer) for answer in plain]
    assert sum(taken) > 4 * num_rows, "rows with a temperature are taken"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cycle_gives_what_the_plain_path_gives(kind: dict[str, Any]) -> None:
    """At full depth in float32, where both run the same arithmetic: tokens and log-probabilities."""
    params = SamplingParams(
        **{"max_tokens": 24, "ignore_eos": True, "seed": 5, **kind, "mode": "full", "threshold": None}
    )
    found = []
    for plain in (True, False):
        parts = cycle_parts(BLOCK, capture=True, dtype="float32")
        if plain:
            parts.runner.cycles = None
        with poisoned(parts) as engine:
            found.append(engine.generate(random_prompts(3, 11), params))
    expected, answers = found
    assert all_ids(answers) == all_ids(expected)
    for one, other in zip(answers, expected, strict=True):
        for token, twin in zip(one.tokens, other.tokens, strict=True):
            assert token.logprob == (None if twin.logprob is None else pytest.approx(twin.logprob, abs=1e-4))
            assert [i for i, _ in token.top_logprobs] == [i for i, _ in twin.top_logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawn_drafts_are_accepted(dtype: str) -> None:
    """So hot that exit and full depth draw nearly alike."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=50.0, seed=3)
    with poisoned(cycle_parts(BLOCK, capture=True, dtype=dtype)) as engine:
        found = engine.generate(random_prompts(3, 11), params)
    assert min(answer.usage.tokens_per_deep_pass for answer in found) > 2.0
