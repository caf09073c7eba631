"""What becomes of a cycle that ran in one go."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

from tide_core.batch import RowStep
from tide_core.exits.accept import Settler
from tide_core.exits.row_cycle import RowCycle
from tide_core.exits.verify import Verifier
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, Request, SamplingParams

POLICIES = (
    ExitPolicy("verified", (0.2,), (math.inf,)),
    ExitPolicy("bounded", (0.2,), (0.9,), 0.02),
    ExitPolicy("bounded", (0.2,), (math.inf,), 0.02),
)


@pytest.mark.parametrize("best", [1.5, -3.0, math.inf, -math.inf, math.nan])
def test_a_row_without_drafts_has_the_same_result_by_the_short_way(best: float) -> None:
    settler = Settler(exit_layer=2, num_layers=9)
    step = RowStep(Request("r", (1,), SamplingParams(), seed=0), BlockTable([4], [0]), (7,), (), True)
    long_way = settler.row(step, 0, ((), ()), [best], (11,))
    assert settler.plain(best, 11) == long_way
    assert (long_way.error is None) == math.isfinite(best)


def drafting_step(policy: ExitPolicy, *stop_ids: int, **params: Any) -> RowStep:
    request = Request("r", (1,), SamplingParams(stop_ids=stop_ids, **params), seed=0, policy=policy)
    return RowStep(request, BlockTable([4], [0]), (7,), (), True, policy, 3)


@pytest.mark.parametrize("params", [{}, {"threshold": 0.5}])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.mode)
def test_drafts_have_the_same_result_whether_or_not_it_is_known_that_all_numbers_are_finite(
    policy: ExitPolicy, params: dict[str, Any]
) -> None:
    settler, random = Settler(exit_layer=2, num_layers=9), Random(0)
    accepted = set()
    for _ in range(300):
        drafts = random.randint(0, 3)
        drafted = tuple(random.random() for _ in range(3)), tuple(random.randint(1, 3) for _ in range(3))
        following = tuple(random.randint(1, 3) for _ in range(drafts + 1))
        best = [random.uniform(-5, 5) for _ in following]
        step = drafting_step(policy, *([3] if random.random() < 0.3 else []), **params)
        ways = [
            settler.row(step, drafts, drafted, best, following, branches=2, is_finite=known) for known in (False, True)
        ]
        assert ways[0] == ways[1]
        assert ways[1].tokens == ways[0].tokens
        accepted.add(ways[0].counts[0].accepted)
    assert {0, 1, 2} <= accepted


@pytest.mark.parametrize("best", [1.5, math.inf, math.nan])
@pytest.mark.parametrize("samples", [True, False])
def test_what_follows_a_prompt_is_the_same_by_the_short_way(best: float, samples: bool) -> None:
    num_layers, where = 9, 11
    step = RowStep(Request("r", (1, 2, 3), SamplingParams(), seed=0), BlockTable([4], [0]), (1, 2, 3), (), samples)
    cycle = RowCycle.begin(step, 1)
    cycle.layers_run = 3 * num_layers
    logits = torch.zeros(int(samples), 16)
    known = torch.tensor([[best], [where]], dtype=torch.float64)[:, : int(samples)]
    [long_way] = Verifier((), num_layers).settle([cycle], [[2] if samples else []], logits, known)
    assert Settler(num_layers, num_layers).prompt(step, best, where) == long_way
    assert long_way.num_valid == 3
    assert len(long_way.tokens) == int(samples and math.isfinite(best))
