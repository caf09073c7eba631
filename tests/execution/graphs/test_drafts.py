"""Drafting in passes of fixed shapes against drafting op by op; here on the CPU, where nothing is captured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import random_prompts
from tests.kernels.twin import twin_kernels
from tide_core.engine.assemble import Parts
from tide_core.execution.graphs.base import FEWEST_BLOCKS
from tide_core.execution.graphs.drafts import CapturedDrafts
from tide_core.kv.kernel_view import Room
from tide_core.request import SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3)}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)


class Counted(CapturedDrafts):
    """Counts its runs."""

    num_runs = num_uneven = 0

    def run(self, rows: Any) -> Any:
        type(self).num_runs += 1
        return super().run(rows)

    def run_chain(self, rows: Any, counts: Any) -> Any:
        type(self).num_runs += 1
        type(self).num_uneven += len(set(counts)) > 1
        assert list(counts) == sorted(counts, reverse=True)
        return super().run_chain(rows, counts)


def parts_with(kind: type[CapturedDrafts] | None, artefact: dict[str, Any], *, easy: bool = True) -> Parts:
    parts = exit_parts(easy=easy, artefact=artefact, kernels="reference", max_rows=8)
    runner = parts.runner
    if kind is not None:
        assert runner.exits is not None
        first = runner.segments[0]
        captured = kind(runner.adapter, runner.cache, twin_kernels(), runner.exits, first)
        runner._drafter._captured = captured  # type: ignore[union-attr]
    return parts


@pytest.mark.parametrize("artefact", [{}, {"kind": "mlp"}, BLOCK, {**BLOCK, "draft_threshold": 0.6}], ids=str)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_tokens_scores_and_exit_layers_are_those_of_drafting_op_by_op(
    artefact: dict[str, Any], params: SamplingParams, num_rows: int
) -> None:
    prompts = random_prompts(num_rows, 11)
    answers = []
    Counted.num_runs = 0
    for kind in (None, Counted):
        with poisoned(parts_with(kind, artefact)) as engine:
            answers.append(engine.generate(prompts, params))
    assert Counted.num_runs > 3
    plain, fixed = answers
    assert all_ids(fixed) == all_ids(plain)
    assert [exit_layers(answer) for answer in fixed] == [exit_layers(answer) for answer in plain]
    for one, other in zip(fixed, plain, strict=True):
        for token, twin in zip(one.tokens, other.tokens, strict=True):
            assert token.score == (None if twin.score is None else pytest.approx(twin.score, abs=1e-5))


def test_rows_that_may_not_exit_or_have_a_prompt_to_run_are_not_taken() -> None:
    Counted.num_runs = 0
    with poisoned(parts_with(Counted, BLOCK)) as engine:
        engine.generate(random_prompts(2, 11), SamplingParams(max_tokens=6, ignore_eos=True, mode="full"))
        assert Counted.num_runs == 0
        engine.generate(random_prompts(2, 11), SamplingParams(max_tokens=1, ignore_eos=True))
        assert Counted.num_runs == 0


def test_few_shapes_come_up() -> None:
    parts = parts_with(Counted, BLOCK)
    with poisoned(parts) as engine:
        for num_rows in (1, 2, 3, 4):
            engine.generate(random_prompts(num_rows, 11), GREEDY)
    drafter = parts.runner._drafter
    assert drafter is not None
    assert drafter._captured is not None
    rooms = {Room(rows, rows, FEWEST_BLOCKS, 3) for rows in (1, 2, 4)}
    assert {room for room, _ in drafter._captured._passes._by_shape} == rooms
    assert {length for _, length in drafter._captured._passes._by_shape} <= {1, 2, 3, 4}


def test_rows_that_draft_the_best_token_are_read_once_and_others_after_each() -> None:
    parts = parts_with(Counted, {**BLOCK, "draft_threshold": 0.0})
    per_run = []
    with poisoned(parts) as engine:
        for params in (GREEDY, DRAWN):
            Counted.num_runs = 0
            [answer] = engine.generate(random_prompts(1, 11), params)
            assert answer.usage is not None
            per_run.append(answer.usage.num_drafts / Counted.num_runs)
    assert per_run[0] > 3
    assert per_run[1] <= 1


def test_rows_of_which_some_may_draft_less_come_in_one_chain() -> None:
    """Near its end a row drafts less than the others."""
    Counted.num_uneven = 0
    answers = []
    for kind in (None, Counted):
        with poisoned(parts_with(kind, {})) as engine:
            answers.append(engine.generate(random_prompts(7, 11), GREEDY))
    assert Counted.num_uneven > 0
    assert all_ids(answers[0]) == all_ids(answers[1])
    assert [exit_layers(answer) for answer in answers[0]] == [exit_layers(answer) for answer in answers[1]]
