"""Suffix drafts in an engine: the tokens of full depth, with fewer passes. On the plain path, and in cycles that run in
one go, where the CUDA kernels' twin stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.exits.test_sampled_distribution import LEAST_P, PROMPT, chi_square_p, exact, run_all
from tests.factories import make_parts, random_prompts
from tests.kernels.twin import engine_kernels
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.engine.scheduler import SuffixSource
from tide_core.errors import EngineError
from tide_core.exits.cost import Acceptance, CostPoint, CostTable, DraftPlanner
from tide_core.exits.policy import resolve_policy
from tide_core.exits.suffix import SuffixDraft, SuffixDrafts
from tide_core.request import ExitPolicy, Grammar, SamplingParams
from tide_core.row import Row
from tide_core.sampling.grammar import GrammarMatcher

CHEAP = ((3, 1.01), (7, 1.02), (15, 1.03))
DEAR = ((3, 50.0), (15, 99.0))
LOOP = [*range(20, 32)] * 4
"""A prompt that a model which repeats itself goes on with."""
ALONE = CostTable(tuple(CostPoint(rows, 1.0, ((0, 1.0), (4, 9.0)), CHEAP) for rows in (1, 64)))
"""Suffix drafts cost next to nothing, drafts of exits never pay."""
BESIDE = CostTable(tuple(CostPoint(rows, 1.0, ((0, 1.0), (1, 1.05), (4, 1.2)), DEAR) for rows in (1, 64)))
"""Drafts of exits pay, and more tokens than theirs do not."""
BLOCK = {"kind": "block", "taps": (2, 3), "draft_threshold": 0.0}


@pytest.fixture(params=["plain", "cycles"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cycles":
        monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return request.param


def with_suffixes(parts: Parts, table: CostTable, drafts: SuffixDrafts | None = None) -> Parts:
    planner = DraftPlanner(4, Acceptance.prior((0.9, 0.8), 4), table, pads=parts.runner.cycles is not None)
    scheduler = parts.core.scheduler
    scheduler.plan_drafts, scheduler.suffixes = planner, SuffixSource(drafts or SuffixDrafts(), planner)
    return parts


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 7, **changes})


class Certain(SuffixDrafts):
    """Proposes the same tokens wherever it is asked."""

    def __init__(self, token_ids: list[int], chance: float = 0.99) -> None:
        super().__init__()
        self._draft = SuffixDraft(token_ids, chance)

    def propose(self, row: Row) -> SuffixDraft | None:
        return self._draft


# Every kind on both paths and with both tables, each path with one table for every other kind.
@pytest.mark.parametrize(
    ("kind", "path", "table"),
    [
        (kind, path, (ALONE, BESIDE)[(number + path_number) % 2])
        for number, kind in enumerate(
            [{}, {"logprobs": 2}, {"repetition_penalty": 1.05}, {"grammar": Grammar("regex", "[a-z ,.]{40,}")}]
        )
        for path_number, path in enumerate(("plain", "cycles"))
    ],
    ids=lambda value: (
        ("alone" if value is ALONE else "beside the exits") if isinstance(value, CostTable) else str(value)
    ),
    indirect=["path"],
)
def test_tokens_are_those_of_full_depth_and_some_come_from_the_text(
    path: str, table: CostTable, kind: dict[str, Any]
) -> None:
    prompts = [LOOP, LOOP[3:], *random_prompts(2, 11)]
    with poisoned(with_suffixes(exit_parts(artefact=BLOCK), table)) as engine:
        full = engine.generate(prompts, asked(mode="full", **kind))
        verified = engine.generate(prompts, asked(mode="verified", **kind))
        alone = [engine.generate([prompt], asked(mode="verified", **kind))[0] for prompt in prompts]
    assert all(answer.error is None for answer in (*full, *verified, *alone))
    assert all_ids(verified) == all_ids(full)
    assert all_ids(alone) == all_ids(full)
    layers = [layer for answer in (*verified, *alone) for layer in exit_layers(answer)]
    assert 0 in layers, "no layer proposed a token that stood in the text"
    passes = sum(answer.usage.deep_passes for answer in verified)
    assert passes < sum(len(answer.tokens) for answer in verified)
    for one, other in zip(verified, full, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])


def test_an_engine_without_an_artefact_has_them_too(path: str) -> None:
    with poisoned(with_suffixes(make_parts(drafts=None), ALONE)) as engine:
        params = asked(mode="full")
        full = engine.generate([LOOP, PROMPT], params)
        core = engine._parts.core
        for number, prompt in enumerate((LOOP, PROMPT)):
            core.add(_request(engine._parts, str(number), prompt))
        found: dict[str, list[int]] = {}
        while core.has_work:
            for output in core.step():
                found.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    assert [found["0"], found["1"]] == all_ids(full)
    assert core.exits.tokens_per_layer[0] > 0


def _request(parts: Parts, name: str, prompt: list[int]) -> Any:
    from tide_core.request import Request

    policy = resolve_policy(asked(), (), 4, suffix_drafts=True)
    assert policy.mode == "verified"
    return Request(name, tuple(prompt), asked(), 7, policy=policy)


def test_wrong_ones_cost_passes_and_change_no_token(path: str) -> None:
    prompts = random_prompts(3, 11)
    with poisoned(with_suffixes(exit_parts(artefact=BLOCK), ALONE, Certain([5, 6, 7, 8, 9, 10, 11]))) as engine:
        full, verified = (engine.generate(prompts, asked(mode=mode)) for mode in ("full", "verified"))
    assert all_ids(verified) == all_ids(full)


def test_drafts_end_with_the_answer(path: str) -> None:
    with poisoned(with_suffixes(exit_parts(artefact=BLOCK), ALONE, Certain([5] * 15))) as engine:
        for length in (1, 2, 3, 9):
            [answer] = engine.generate([LOOP], asked(max_tokens=length))
            assert len(answer.tokens) == length


@pytest.mark.parametrize("changes", [{"threshold": 0.5}, {"min_layers": 1}, {"mode": "bounded", "epsilon": 0.1}])
def test_rows_that_ask_for_a_score_or_a_layer_have_none(path: str, changes: dict[str, Any]) -> None:
    with poisoned(with_suffixes(exit_parts(artefact=BLOCK), ALONE, Certain([5] * 15))) as engine:
        [answer] = engine.generate([LOOP], asked(**changes))
    assert 0 not in exit_layers(answer)


@pytest.mark.parametrize("table", [ALONE, BESIDE], ids=["alone", "beside the exits"])
def test_samples_have_the_distribution_of_full_depth(path: str, table: CostTable) -> None:
    num_draws = 3_000 if path == "plain" else 500  # the twin is slow
    params = SamplingParams(max_tokens=3, temperature=0.8, top_k=4, ignore_eos=True, mode="verified")
    chances = exact(params, 3)
    likeliest = max(chances, key=chances.__getitem__)
    parts = exit_parts(max_rows=64, max_batch_tokens=512, artefact={"draft_threshold": 0.0})
    with_suffixes(parts, table, Certain([likeliest[1], likeliest[2]]))
    policy: ExitPolicy = resolve_policy(params, parts.checkpoints, 4)
    observed = run_all(parts.core, params, policy, num_draws)
    exits = parts.core.exits
    assert exits.tokens_per_layer[0] > 0.05 * num_draws, "some were accepted"
    assert exits.accepted < 0.95 * exits.drafts, "and some were rejected"
    assert chi_square_p(observed, chances) > LEAST_P


def test_a_budget_keeps_suffix_drafts_too_and_without_an_artefact(path: str) -> None:
    """Some wrong and a few right; all that the budget allows of the first are kept."""
    prompts = random_prompts(3, 9)
    engine = poisoned(with_suffixes(make_parts(suffix_drafts=True), ALONE, Certain([5, 6])))
    engine._parts = replace(engine._parts, suffix_drafts=True)
    with engine:
        verified = engine.generate(prompts, asked(mode="verified"))
        answers = engine.generate(prompts, asked(mode="bounded", epsilon=0.25, margin=9.0))
    assert all_ids(verified) != all_ids(answers)
    for answer in answers:
        kept = [token for token in answer.tokens if token.gap is not None]
        assert len(kept) == answer.usage.num_differing == 9, "a quarter of those before the last, which no draft is"
        assert all(token.exit_layer == 0 and token.token_id in (5, 6) for token in kept)


def test_a_grammar_that_cannot_be_followed_any_more_is_an_error_of_its_request_alone(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose parser reaches a limit: also where its suffix drafts are the first to need it."""
    num_allowed, write, allowed = GrammarMatcher.num_allowed, GrammarMatcher.write, GrammarMatcher.allowed

    def check(output_ids: Sequence[int]) -> None:
        if len(output_ids) >= 5:
            raise EngineError("the grammar cannot be followed: too many states")

    def limited(followed: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: GrammarMatcher, output_ids: Sequence[int], *more: Any) -> Any:
            check(output_ids)
            return followed(self, output_ids, *more)

        return wrapped

    for name, followed in (("num_allowed", num_allowed), ("write", write), ("allowed", allowed)):
        monkeypatch.setattr(GrammarMatcher, name, limited(followed))
    grammar = Grammar("regex", "[a-z ,.]{40,}")
    with poisoned(with_suffixes(exit_parts(artefact=BLOCK), ALONE, Certain([20, 21]))) as engine:
        bad, good = engine.generate([LOOP, LOOP], [asked(grammar=grammar), asked()])
    assert bad.error is not None
    assert "cannot be followed" in str(bad.error)
    assert good.error is None
    assert len(good.tokens) == 40
