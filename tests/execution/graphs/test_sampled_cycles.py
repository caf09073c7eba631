"""Rows that draw at random in cycles that run in one go; here on the CPU, where the CUDA kernels' twin stands in."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.exits.test_sampled_distribution import LEAST_P, chi_square_p, exact, run_all
from tests.factories import make_parts, random_prompts
from tide_core.batch import RowStep
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import branches
from tide_core.execution.graphs.launch_depth import LaunchDepth, LaunchDepths
from tide_core.execution.graphs.prompts import GraphPrompts
from tide_core.exits.policy import resolve_policy
from tide_core.request import SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3)}
EVERY = {"draft_threshold": 0.0}
"""Every draft counts, with and without cycles in one go: then both use the same random numbers."""
NUM_DRAWS = 2_000
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1e-30},
    {"temperature": 100.0, "top_k": 300, "top_p": 1e-6},
    {"temperature": 50.0, "min_p": 1.0},
]


def drawing(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "seed": 7, "temperature": 0.8, **changes})


def plainly(prompts: list[list[int]], params: SamplingParams, **settings: Any) -> list[Completion]:
    """Asked before `cycles` is."""
    with poisoned(exit_parts(kernels="reference", **settings)) as engine:
        return engine.generate(prompts, params)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("mode", ["full", "verified"])
def test_the_same_seed_gives_the_tokens_of_the_plain_engine(
    filters: dict[str, Any], mode: str, request: pytest.FixtureRequest
) -> None:
    prompts, params = random_prompts(3, 11), drawing(mode=mode, **filters)
    plain = plainly(prompts, params, artefact=EVERY)
    cycles = request.getfixturevalue("cycles")
    with poisoned(exit_parts(artefact=EVERY)) as engine:
        answers = engine.generate(prompts, params)
    assert all_ids(answers) == all_ids(plain)
    assert max(row.num_drafts for rows in cycles for row in rows) == (4 if mode == "verified" else 0)
    for one, other in zip(answers, plain, strict=True):
        assert exit_layers(one) == exit_layers(other)
        assert one.usage.num_drafts == other.usage.num_drafts
        assert one.usage.num_accepted == other.usage.num_accepted


@pytest.mark.parametrize("artefact", [{"kind": "mlp", **EVERY}, {**BLOCK, **EVERY}], ids=str)
@pytest.mark.parametrize("more", [{"mode": "bounded", "epsilon": 0.05}, {"threshold": 0.5}], ids=str)
def test_a_bound_is_served_as_verified_and_a_threshold_of_ones_own_is_kept(
    artefact: dict[str, Any], more: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompts, params = random_prompts(2, 11), drawing(**more)
    plain = plainly(prompts, params, artefact=artefact)
    cycles = request.getfixturevalue("cycles")
    with poisoned(exit_parts(artefact=artefact)) as engine:
        answers = engine.generate(prompts, params)
    assert cycles
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert exit_layers(one) == exit_layers(other)
        assert [token.audit for token in one.tokens] == [token.audit for token in other.tokens]


def test_without_an_artefact_rows_draw_at_full_depth(request: pytest.FixtureRequest) -> None:
    prompts, params = random_prompts(3, 11), drawing(top_p=0.9)
    with poisoned(make_parts(kernels="reference")) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(make_parts()) as engine:
        answers = engine.generate(prompts, params)
    assert cycles
    assert all_ids(answers) == all_ids(plain)


def test_samples_have_the_distribution_of_full_depth(cycles: list[list[RowStep]]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, ignore_eos=True, mode="verified", top_k=6, top_p=0.9)
    parts = exit_parts(drafts=2, max_rows=64, max_batch_tokens=1024, artefact=EVERY)
    observed = run_all(parts.core, params, resolve_policy(params, parts.checkpoints, 4), NUM_DRAWS)
    assert parts.core.exits.drafts >= NUM_DRAWS, "drafts there were"
    assert 0.2 < parts.core.exits.accepted / parts.core.exits.drafts < 0.98, "and some were rejected"
    assert sum(map(len, cycles)) >= NUM_DRAWS, "in cycles"
    assert chi_square_p(observed, exact(params, 3)) > LEAST_P


def test_rows_of_every_kind_share_a_cycle_and_get_what_they_get_alone(cycles: list[list[RowStep]]) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"mode": "full"},
        {"top_p": 0.9, "seed": 3},
        {"max_tokens": 5, "top_k": 4},
        {"temperature": 0.0, "max_tokens": 14},
        {"temperature": 1.2, "min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"mode": "fast", "threshold": 0.3},
    ]
    prompts, params = random_prompts(len(kinds), 11), [drawing(**kind) for kind in kinds]
    with poisoned(exit_parts(artefact={**BLOCK, **EVERY}, max_rows=8)) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert all(answer.error is None for answer in together)
    assert all_ids(together) == all_ids(alone)
    mixed = [{row.request.params.is_greedy for row in rows} for rows in cycles]
    assert {True, False} in mixed


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 9, "min_p": 0.1}, True),
        ({"threshold": 0.4}, True),
        ({"logprobs": 0}, True),
        ({"logit_bias": {5: 1.0}}, True),
        ({"min_tokens": 3}, True),
        ({"presence_penalty": 0.5}, True),
        ({"mode": "fast", "threshold": 0.3}, False),
    ],
    ids=str,
)
def test_rows_run_in_cycles_unless_they_skip_layers(
    changes: dict[str, Any], taken: bool, cycles: list[list[RowStep]]
) -> None:
    with poisoned(exit_parts(artefact=EVERY)) as engine:
        [answer] = engine.generate(random_prompts(1, 11), drawing(**changes))
    assert answer.error is None
    assert bool(cycles) == taken


def test_scores_that_are_no_numbers_leave_plain_draws(cycles: list[list[RowStep]]) -> None:
    prompts = random_prompts(2, 11)
    parts = exit_parts(artefact={**BLOCK, **EVERY})
    assert parts.runner.exits is not None
    with torch.no_grad():
        parts.runner.exits._scorers[0].weights.out.fill_(float("nan"))
    with poisoned(parts) as engine:
        broken = engine.generate(prompts, drawing())
        full = engine.generate(prompts, drawing(mode="full"))
    assert all_ids(broken) == all_ids(full)
    assert {layer for answer in broken for layer in exit_layers(answer)} == {max(exit_layers(full[0]))}
    assert broken[0].usage.num_drafts == 0


def test_a_row_with_a_number_that_is_none_ends_alone(cycles: list[list[RowStep]]) -> None:
    prompts, params = random_prompts(3, 11), drawing()
    with poisoned(exit_parts(artefact=EVERY)) as engine:
        sound = engine.generate(prompts, params)
    parts = exit_parts(artefact=EVERY)
    adapter, head = parts.runner.adapter, parts.runner.adapter.head

    def spoiled(normed: torch.Tensor) -> torch.Tensor:
        logits = head(normed)
        if len(logits) > 3:  # a cycle
            logits[5:10] = float("nan")  # all tokens of the second row while each has four drafts
        return logits

    adapter.head = spoiled  # type: ignore[method-assign]
    with poisoned(parts) as engine:
        first, bad, _ = engine.generate(prompts, params)
    assert bad.finish_reason == "error"
    assert "numerical_error: the largest logit of the row is nan" in str(bad.error)
    assert len(bad.tokens) < len(sound[1].tokens)
    assert first.tokens[0].token_id == sound[0].tokens[0].token_id


def test_cycles_in_which_nothing_is_drawn_keep_their_own_shapes(cycles: list[list[RowStep]]) -> None:
    parts = exit_parts(artefact=EVERY)
    prompts = random_prompts(2, 11)
    with poisoned(parts) as engine:
        engine.generate(prompts, drawing(temperature=0.0))
        assert parts.runner.cycles is not None
        greedy = set(parts.runner.cycles._graphs)
        assert not any(shape.samples for shape in greedy)
        engine.generate(prompts, drawing())
    others = set(parts.runner.cycles._graphs) - greedy
    assert others
    assert all(shape.samples for shape in others)


def test_a_cycle_that_failed_once_leaves_nothing_behind(cycles: list[list[RowStep]]) -> None:
    """Between the first draft and the verdict: the row is run again, alone, in a cycle of the same shape."""
    prompts, params = random_prompts(1, 11), drawing()
    with poisoned(exit_parts(artefact={**BLOCK, **EVERY})) as engine:
        sound = engine.generate(prompts, params)
    parts = exit_parts(artefact={**BLOCK, **EVERY})
    adapter, head, calls = parts.runner.adapter, parts.runner.adapter.head, list[int]()

    def failing(normed: torch.Tensor) -> torch.Tensor:
        calls.append(len(normed))
        if len(calls) == 3:
            raise MemoryError("once")
        return head(normed)

    def checked(logits: torch.Tensor, cycle: Any, **where: Any) -> Any:
        assert len(cycle.draft_logits) == len(cycle.accept), "as many drafts as there are numbers for"
        return verify(logits, cycle, **where)

    runner = parts.runner.cycles
    assert runner is not None
    verify = runner._kernels.verify_drawn
    runner._kernels = replace(runner._kernels, verify_drawn=checked)
    adapter.head = failing  # type: ignore[method-assign]
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, params)
    assert all_ids(answers) == all_ids(sound)
    assert answers[0].error is None


class AnyDepth(LaunchDepth):
    """Another number of steps in every launch."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def restart(self) -> None:
        self.steps = self._random.choice((1, 1, 2, 3, 4))

    def observe(self, steps: int, device_s: float, wait_s: float, period_s: float) -> None:
        self.restart()


@pytest.mark.parametrize("kind", ["bounded", "drawn", "greedy"])
def test_tokens_and_scores_depend_neither_on_launch_depth_nor_on_when_prompts_are_done(
    cycles: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = GraphPrompts._is_done
    monkeypatch.setattr(branches, "MAX_BRANCHES", 1)  # a row that runs nearly alone has another chance at its draft
    more = {"bounded": {"mode": "bounded"}, "drawn": {"temperature": 0.8, "seed": 3}, "greedy": {}}[kind]
    settings = {"ignore_eos": True, "mode": "verified", **more}
    params = [SamplingParams(max_tokens=4 + 7 * row % 13, **settings) for row in range(24)]  # many ends of answers
    model: dict[str, Any] = {"easy": True, "share": 0.3, "artefact": EVERY}
    if kind == "bounded":  # an exit that is wrong, and emitted now and then
        model = {"easy": False, "artefact": {"kind": "mlp", **EVERY}}

    def answers(seed: int | None) -> list[list[tuple[int, int, float | None]]]:
        random = Random(seed)
        parts = exit_parts("qwen3", **model, max_rows=8, max_batch_tokens=1024)
        if seed is not None:
            assert parts.runner.cycles is not None
            parts.runner.cycles.depths = LaunchDepths(lambda: AnyDepth(random))
            monkeypatch.setattr(GraphPrompts, "_is_done", lambda self: random.random() < 0.5 and is_done(self))
        with poisoned(parts) as engine:
            found = engine.generate(random_prompts(24, 11), params)
        return [[(token.token_id, token.exit_layer, token.score) for token in answer.tokens] for answer in found]

    expected = answers(None)
    assert {layer for answer in expected for _, layer, _ in answer} == {1, 4}
    for seed in range(1, 3):
        for one, other in zip(answers(seed), expected, strict=True):
            assert [token[:2] for token in one] == [token[:2] for token in other]
            scores = [(a[2], b[2]) for a, b in zip(one, other, strict=True)]
            assert all((a is None) == (b is None) and (a is None or a == pytest.approx(b, abs=1e-4)) for a, b in scores)
