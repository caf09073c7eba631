"""Rows that follow a grammar in cycles; here on the CPU, where the CUDA kernels' twin stands in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.exits.test_sampled_distribution import LEAST_P, chi_square_p
from tests.factories import make_parts, random_prompts
from tide_core.batch import RowResult, RowStep
from tide_core.execution.graphs import cycle_graph, cycle_shape, masks
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.execution.graphs.masks import MaskBuffer
from tide_core.request import Grammar, SamplingParams
from tide_core.sampling.grammar import FIRST_MISFITS

BLOCK = {"kind": "block", "taps": (2, 3), "draft_threshold": 0.0}
WORDS = Grammar("regex", r"[a-z ,.]{60,}")
HALF = Grammar("regex", "[^a-m]*")
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


@pytest.fixture
def num_masks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Cycles that masks were computed for, under `sent`."""
    count: Counter[str] = Counter()
    send = MaskBuffer.send

    def counted(self: MaskBuffer, *arguments: Any) -> None:
        count["sent"] += 1
        send(self, *arguments)

    monkeypatch.setattr(MaskBuffer, "send", counted)
    return count


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Of every attempt to launch ahead: which of its rows follow a grammar."""
    tried: list[list[bool]] = []
    launch = GraphCycles._launch_ahead

    def noted(self: GraphCycles, rows: Any, *more: Any) -> InFlightStep | None:
        tried.append([row.request.mask is not None for row in rows])
        return launch(self, rows, *more)

    monkeypatch.setattr(GraphCycles, "_launch_ahead", noted)
    return tried


@pytest.mark.parametrize("logprobs", [None, 2])
def test_greedy_rows_run_without_masks_and_what_does_not_fit_is_replaced(
    logprobs: int | None, cycles: list[list[RowStep]], num_masks: Counter[str], request: pytest.FixtureRequest
) -> None:
    """About half of all tokens fit, drafts among them, so both are seen. Now and then none of the likeliest fits."""
    prompts, params = random_prompts(3, 11), asked(grammar=HALF, max_tokens=40, logprobs=logprobs)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(prompts, params)
        free = engine.generate(prompts, asked(max_tokens=40))
    assert num_masks["sent"] < len(cycles) / 8
    assert all_ids(answers) != all_ids(free)
    assert all(re.fullmatch("[^a-m]*", answer.text) for answer in answers)
    assert sum(answer.usage.num_accepted for answer in answers) > 0
    assert all(len(answer.tokens) == 40 for answer in answers)
    for answer in answers:
        assert answer.usage.num_accepted == sum(layer < 4 for layer in exit_layers(answer))
    del cycles[:]
    with poisoned(exit_parts(kernels="reference", artefact=BLOCK)) as engine:
        plain = engine.generate(prompts, params)
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])
        assert [[i for i, _ in token.top_logprobs] for token in one.tokens] == [
            [i for i, _ in token.top_logprobs] for token in other.tokens
        ]


def test_where_none_of_the_likeliest_tokens_fits_a_mask_chooses(
    cycles: list[list[RowStep]], num_masks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(3, 11), asked(grammar=HALF, max_tokens=30)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        among_many = engine.generate(prompts, params)
    many = num_masks.pop("sent", 0)
    for module in (cycle_shape, cycle_graph):
        monkeypatch.setattr(module, "MAX_LOGPROBS", 2)
    del cycles[:]
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        among_two = engine.generate(prompts, params)
    assert many < num_masks["sent"] < len(cycles), "others have none"
    assert all_ids(among_two) == all_ids(among_many)


def test_launched_ahead_or_not_tokens_are_the_same(
    cycles: list[list[RowStep]], ahead: list[list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched ahead with a token that does not fit is lost, for that row alone."""
    prompts, params = (
        random_prompts(3, 11),
        [asked(grammar=HALF, max_tokens=40), asked(max_tokens=40), asked(grammar=WORDS)],
    )
    found = []
    for most in (-1.0, 1.0):
        monkeypatch.setattr(masks, "MOST_MISFITS", most)
        with poisoned(exit_parts(artefact=BLOCK)) as engine:
            found.append(all_ids(engine.generate(prompts, params)))
        assert any(any(with_grammar) for with_grammar in ahead) == (most > 0)
    assert found[0] == found[1]


def test_rows_are_launched_ahead_once_most_tokens_fit() -> None:
    row = SimpleNamespace(request=SimpleNamespace(mask=FakeMask()), output_ids=(), policy=None)
    free = SimpleNamespace(request=SimpleNamespace(mask=None))
    seen = []
    for fitting in [True] * 25 + [False, True, False]:
        row.request.mask.fitting = fitting
        masks.obeyed(row, RowResult((1,), (4,), (None,), 1), lambda _: ((0,), (-0.5,)), 4)
        seen.append(masks.fits_mostly([row]))
    assert seen.index(True) in range(10, 20), "not at the beginning of an answer"
    assert seen[25], "one that does not fit does not matter"
    assert not seen[-1]
    assert masks.fits_mostly([row, free, free]), "and few of many rows do not"


class FakeMask:
    """Allows token 0 alone, or any."""

    masked_at, misfits, fitting = -1, FIRST_MISFITS, True

    def num_fitting(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        return len(token_ids) if self.fitting else 0

    def allowed(self, output_ids: Sequence[int]) -> list[bool]:
        return [True, self.fitting]


def test_a_sampled_row_with_a_grammar_is_never_launched_ahead_and_others_are_once_it_has_ended(
    cycles: list[list[RowStep]], ahead: list[list[bool]]
) -> None:
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        kinds = asked(max_tokens=40), asked(grammar=WORDS, max_tokens=6, temperature=0.7)
        engine.generate(random_prompts(2, 11), kinds)
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
