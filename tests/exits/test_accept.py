"""The one rule by which drafts are kept, and its twin on the device."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide_core.batch import RowStep
from tide_core.execution.graphs.cycle_shape import CycleInputs, CycleShape, RowPlace
from tide_core.exits.accept import Compared, accept, counts, cycle_min_score, keeps
from tide_core.kernels.reference.cycle import AGREES, IF_RIGHT, LEAVES, MARGIN, MOST_ROWS, START, accept_drafts
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Budget, ExitPolicy, Request, SamplingParams

pytestmark = pytest.mark.unit

BUDGETS = [None, *(Budget(epsilon, margin) for epsilon in (0.02, 0.05, 0.3, 0.99) for margin in (0.1, 0.5, 1e300))]
NEAR = 0.25


def compared(*agrees: bool, score: float = 0.9, gap: float = NEAR) -> list[Compared]:
    return [Compared(score, agrees=each, gap=gap) for each in agrees]


def test_drafts_are_accepted_up_to_the_first_that_full_depth_does_not_choose() -> None:
    assert accept(compared(True, True, False, True)) == [None, None]


def test_a_draft_below_the_least_score_does_not_count_though_full_depth_agrees() -> None:
    drafts = [Compared(score, agrees=True, min_score=0.5) for score in (0.6, 0.5, 0.4, 0.9)]
    assert accept(drafts) == [None, None]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_draft_whose_score_is_not_finite_never_counts(score: float) -> None:
    assert not counts(score, -math.inf)
    assert accept(compared(True, False, score=score), Budget(0.9, 9.0), 100) == []


def test_a_budget_keeps_what_lies_within_share_and_margin() -> None:
    budget = Budget(0.05, NEAR)
    assert accept(compared(False), budget, 18) == []
    assert accept(compared(False), budget, 19) == [NEAR], "one of twenty"
    assert accept(compared(False), budget, 38, 1) == []
    assert accept(compared(False), budget, 39, 1) == [NEAR]
    assert accept(compared(True, False, False), budget, 38, 1) == [None, NEAR], "those before count, too"
    assert accept(compared(False, gap=math.nextafter(NEAR, 1.0)), budget, 1000) == []


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_gap_that_is_no_number_is_never_kept(gap: float) -> None:
    assert accept(compared(False, gap=gap), Budget(0.99, 1.7e308), 1000) == []


def test_what_the_score_rules_out_is_not_kept_by_a_budget() -> None:
    assert accept([Compared(0.4, agrees=False, gap=0.0, min_score=0.5)], Budget(0.9, 9.0), 100) == []


def test_a_whole_cycle_ignores_the_calibrated_threshold() -> None:
    policy = ExitPolicy("verified", (0.2,))
    assert cycle_min_score(request(policy)) == -math.inf
    assert cycle_min_score(request(policy, threshold=0.5)) == 0.5


@given(
    st.floats(1e-3, 0.999),
    st.floats(1e-3, 5.0),
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(0.0, 6.0)), max_size=6), max_size=40),
)
def test_an_answer_is_within_its_budget_at_every_moment(
    epsilon: float, margin: float, cycles: list[list[tuple[bool, float]]]
) -> None:
    budget, answer = Budget(epsilon, margin), list[float | None]()
    for cycle in cycles:
        differing = sum(gap is not None for gap in answer)
        drafts = [Compared(0.9, agrees=agrees, gap=gap) for agrees, gap in cycle]
        kept = accept(drafts, budget, len(answer), differing)
        answer += [*kept, None]  # and the token of full depth
        if len(kept) < len(drafts):  # no further than needed: the rule is kept by not one more
            refused, now = drafts[len(kept)], sum(gap is not None for gap in answer)
            assert not refused.agrees
            assert refused.gap > margin or now + 1 > epsilon * len(answer)
        for end in range(len(answer) + 1):
            assert sum(gap is not None for gap in answer[:end]) <= epsilon * end
    assert all(gap is None or gap <= margin for gap in answer)


def request(policy: ExitPolicy, **params: Any) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(max_tokens=10**6, **params), seed=0, policy=policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_twin_on_the_device_keeps_what_the_rule_keeps_and_counts_on_from_cycle_to_cycle(dtype: torch.dtype) -> None:
    """Answers over many cycles, of which the host knows the count of the first and the device all others."""
    random, num_rows, num_drafts, vocab_size = Random(0), 6, 4, 5
    seen, generator = set[tuple[int, int]](), torch.Generator().manual_seed(0)
    for _ in range(12):
        budgets = random.choices(BUDGETS, k=num_rows)
        least = random.choices((None, 0.3), k=num_rows)
        policies = [ExitPolicy("bounded", (0.2,), budget) for budget in budgets]
        counted = sorted(random.choices(range(num_drafts + 1), k=num_rows), reverse=True)
        emitted = [random.randint(1, 60) for _ in range(num_rows)]
        differing = [0] * num_rows
        places = list(range(num_rows))
        device_state = torch.zeros((3, MOST_ROWS), dtype=torch.int32)
        for cycle in range(25):
            shape = CycleShape(num_rows, num_drafts, 1)
            host, order = np.zeros(shape.size, dtype=np.int32), random.sample(range(num_rows), num_rows)
            rows = [
                RowPlace(
                    RowStep(
                        request(policies[row], threshold=least[row]),
                        *(BlockTable(2 + emitted[row], [0]), (7,), (), True, policies[row], counted[place], ()),
                        differing[row] if cycle == 0 else 10**6,  # the host does not know it
                    ),
                    *(counted[place], [0], -1 if cycle == 0 else places[row]),
                )
                for place, row in enumerate(order)
            ]
            begins = CycleInputs(shape, host).fill(rows)
            row_meta = torch.from_numpy(shape.split(host)[0])
            assert (row_meta[START] < 0).all() == (cycle > 0)
            assert (row_meta[LEAVES] == IF_RIGHT).all()
            starts = torch.tensor([*begins, begins[-1] + counted[-1] + 1]).int()
            num_tokens = num_rows * (num_drafts + 1)
            positions = torch.zeros(num_tokens, dtype=torch.int64)
            for place, row in enumerate(order):
                tokens = counted[place] + 1
                positions[begins[place] : begins[place] + tokens] = 2 + emitted[row] + torch.arange(tokens)
            drafted = torch.randint(0, vocab_size, (num_drafts, num_rows), generator=generator)
            scores = torch.rand(num_drafts, num_rows, generator=generator)
            scores[random.randrange(num_drafts), random.randrange(num_rows)] = random.choice((math.nan, math.inf))
            logits = (torch.randn(num_tokens, vocab_size, generator=generator) / 4).to(dtype)
            logits[torch.rand(logits.shape, generator=generator) < 0.05] = -math.inf
            logits[:, 0] = logits[:, 0].clamp(min=-1.0)
            following, gaps = logits.argmax(-1), torch.full((num_tokens,), 77.0)
            chosen, next_state = following.clone(), torch.zeros((2, num_rows), dtype=torch.int64)
            accept_drafts(
                *(row_meta, torch.tensor(counted).int(), starts, positions, drafted, scores, following),
                *(logits, gaps, 1, device_state, next_state),
            )
            for place, row in enumerate(order):
                begin, drafts = begins[place], list[Compared]()
                for distance in range(counted[place]):
                    draft, best = int(drafted[distance, place]), int(chosen[begin + distance])
                    of_row = logits[begin + distance].float()
                    gap = float(of_row[best] - of_row[draft])
                    score = float(scores[distance, place])
                    drafts.append(Compared(score, draft == best, gap, -math.inf if least[row] is None else least[row]))
                kept = accept(drafts, budgets[row], emitted[row], differing[row])
                end = begin + len(kept)
                assert following[begin:end].tolist() == drafted[: len(kept), place].tolist()
                assert next_state[:, place].tolist() == [int(chosen[end]), 3 + emitted[row] + len(kept)]
                if budgets[row] is not None:
                    assert gaps[begin : end + 1].tolist() == [AGREES if gap is None else gap for gap in [*kept, None]]
                emitted[row] += len(kept) + 1
                differing[row] += (num := sum(gap is not None for gap in kept))
                assert device_state[:, place].tolist() == [*next_state[:, place].tolist(), differing[row]]
                places[row] = place
                seen.add((len(kept), num))
    assert {0, 1, 2, 3, 4} == {kept for kept, _ in seen}
    assert {0, 1, 2} <= {num for _, num in seen}


def test_the_margin_of_the_device_is_that_of_the_rule_for_every_gap() -> None:
    """Gaps are float32 numbers; the margin, a double, is rounded down to one."""
    for margin in (0.2, 0.1, 1 / 3, 1e-30, 5.0, 1e30):
        policy = ExitPolicy("bounded", (0.2,), Budget(0.5, margin))
        shape, host = CycleShape(1, 1, 1), np.zeros(CycleShape(1, 1, 1).size, dtype=np.int32)
        step = RowStep(request(policy), BlockTable(9, [0]), (7,), (), True, policy, 1)
        CycleInputs(shape, host).fill([RowPlace(step, 1, [0])])
        on_device = shape.split(host)[0][MARGIN].view(np.float32)[0]
        for gap in (on_device, np.nextafter(on_device, np.float32(np.inf))):
            assert (gap <= on_device) == keeps(Budget(0.5, margin), float(gap), 9, 0)
