"""What becomes of a cycle that ran in one go."""

from __future__ import annotations

import math

import pytest

from tide_core.batch import RowStep
from tide_core.engine.greedy import Drafted, Settler
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Request, SamplingParams


@pytest.mark.parametrize("best", [1.5, -3.0, math.inf, -math.inf, math.nan])
def test_a_row_without_drafts_has_the_same_result_by_the_short_way(best: float) -> None:
    settler = Settler(exit_layer=2, num_layers=9)
    step = RowStep(Request("r", (1,), SamplingParams(), seed=0), BlockTable([4], [0]), (7,), (), True)
    long_way = settler.row(step, Drafted((), ()), [best], [11])
    assert settler.plain(best, 11) == long_way
    assert (long_way.error is None) == math.isfinite(best)
