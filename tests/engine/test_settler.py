"""What becomes of a cycle that ran in one go."""

from __future__ import annotations

import math

import pytest
import torch

from tide_core.batch import RowStep
from tide_core.engine.cycle import RowCycle
from tide_core.engine.greedy import Drafted, Settler
from tide_core.engine.verify import Verifier
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Request, SamplingParams


@pytest.mark.parametrize("best", [1.5, -3.0, math.inf, -math.inf, math.nan])
def test_a_row_without_drafts_has_the_same_result_by_the_short_way(best: float) -> None:
    settler = Settler(exit_layer=2, num_layers=9)
    step = RowStep(Request("r", (1,), SamplingParams(), seed=0), BlockTable([4], [0]), (7,), (), True)
    long_way = settler.row(step, Drafted((), ()), [best], [11])
    assert settler.plain(best, 11) == long_way
    assert (long_way.error is None) == math.isfinite(best)


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
