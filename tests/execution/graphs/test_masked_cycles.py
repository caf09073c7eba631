"""Rows that follow a grammar in cycles that run in one go; here on the CPU, where the CUDA kernels' twin stands in."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.exits.test_sampled_distribution import LEAST_P, chi_square_p
from tests.factories import make_parts, random_prompts
from tide_core.batch import RowStep
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.request import Grammar, SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3), "draft_threshold": 0.0}
WORDS = Grammar("regex", r"[a-z ,.]{60,}")
LISTED = Grammar("regex", r"([a-f]{2,5}, ?){8,}[0-9]{6}")
KINDS: list[dict[str, Any]] = [
    {"grammar": WORDS, "mode": "full"},
    {"grammar": WORDS},
    {"grammar": WORDS, "mode": "bounded", "epsilon": 0.1},
    {"grammar": LISTED},
    {"grammar": LISTED, "logprobs": 2},
    {"grammar": LISTED, "repetition_penalty": 1.3, "logit_bias": {40: 2.0}},
    {"grammar": Grammar("choice", '["red", "dark green", "blue and more"]'), "ignore_eos": False},
]


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 7, **changes})


# Those of mode bounded differ, as the plain path masks its drafts.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.get("mode") != "bounded"], ids=str)
def test_greedy_rows_get_what_the_plain_path_gives(kind: dict[str, Any], request: pytest.FixtureRequest) -> None:
    prompts, params = random_prompts(3, 11), asked(**kind)
    with poisoned(exit_parts(kernels="reference", artefact=BLOCK)) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(prompts, params)
    assert any(row.request.mask is not None for rows in cycles for row in rows), "in cycles"
    assert all(answer.error is None for answer in answers)
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])


def test_drafts_are_accepted_under_a_grammar_and_tokens_are_those_of_full_depth(cycles: list[list[RowStep]]) -> None:
    prompts = random_prompts(4, 11)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        full, verified = (engine.generate(prompts, asked(grammar=WORDS, mode=mode)) for mode in ("full", "verified"))
    assert all_ids(verified) == all_ids(full)
    assert all(re.fullmatch("[a-z ,.]*", answer.text) for answer in verified)
    assert sum(answer.usage.num_accepted for answer in verified) > 0
    assert any(layer < 4 for answer in verified for layer in exit_layers(answer))


def test_a_budget_keeps_no_draft_that_the_grammar_forbids(cycles: list[list[RowStep]]) -> None:
    wide = asked(grammar=WORDS, mode="bounded", epsilon=0.9, margin=1e30, max_tokens=40)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(random_prompts(4, 11), wide)
    assert any(token.gap is not None for answer in answers for token in answer.tokens)
    assert all(re.fullmatch("[a-z ,.]*", answer.text) for answer in answers)


def test_rows_of_every_kind_share_a_cycle_and_get_what_they_get_alone(cycles: list[list[RowStep]]) -> None:
    kinds = [*KINDS, {}, {"mode": "full"}, {"temperature": 0.8}, {"grammar": LISTED, "temperature": 0.8}]
    prompts, params = random_prompts(len(kinds), 11), [asked(**kind) for kind in kinds]
    with poisoned(exit_parts(artefact=BLOCK, max_rows=12)) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert max(len(rows) for rows in cycles) == len(kinds)
    assert all(answer.error is None for answer in together)
    assert all_ids(together) == all_ids(alone)


def test_a_row_with_a_grammar_is_never_launched_ahead_and_others_are_once_it_has_ended(
    cycles: list[list[RowStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[list[bool]] = []
    launch = GraphCycles._launch_ahead

    def noted(self: GraphCycles, rows: Any, *more: Any) -> InFlightStep | None:
        ahead.append([row.request.mask is not None for row in rows])
        return launch(self, rows, *more)

    monkeypatch.setattr(GraphCycles, "_launch_ahead", noted)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        engine.generate(random_prompts(2, 11), [asked(max_tokens=40), asked(grammar=WORDS, max_tokens=6)])
    assert ahead, "the other one is, later"
    assert not any(any(masked) for masked in ahead)


def test_fewest_tokens_beside_a_grammar_take_the_plain_path(cycles: list[list[RowStep]]) -> None:
    params = asked(grammar=Grammar("choice", '["red"]'), min_tokens=20, ignore_eos=False)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        (answer,) = engine.generate(random_prompts(1, 11), params)
    assert answer.text == "red"
    assert not cycles


def test_samples_under_a_grammar_have_the_distribution_of_full_depth(cycles: list[list[RowStep]]) -> None:
    grammar, num = Grammar("regex", "[ab]{2}x*"), 200
    kinds = [asked(grammar=grammar, temperature=0.9, max_tokens=2, seed=n, mode="verified") for n in range(num)]
    full = [asked(grammar=grammar, temperature=0.9, max_tokens=2, seed=n, mode="full") for n in range(num, 4 * num)]
    prompt = random_prompts(1, 11)[0]
    with poisoned(exit_parts(artefact=BLOCK, max_rows=64, max_batch_tokens=1024)) as engine:
        observed = [answer.text for answer in engine.generate([prompt] * num, kinds)]
        expected = [answer.text for answer in engine.generate([prompt] * len(full), full)]
    texts = sorted(set(expected) | set(observed))
    assert all(re.fullmatch("[ab]{2}", text) for text in texts)
    shares = {text: max(expected.count(text), 1) / len(expected) for text in texts}
    assert chi_square_p(Counter(observed), shares) > LEAST_P


def test_without_an_artefact_rows_follow_their_grammar_at_full_depth(request: pytest.FixtureRequest) -> None:
    prompts, params = random_prompts(3, 11), asked(grammar=LISTED)
    with poisoned(make_parts(kernels="reference")) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(make_parts()) as engine:
        answers = engine.generate(prompts, params)
    assert cycles
    assert all_ids(answers) == all_ids(plain)
