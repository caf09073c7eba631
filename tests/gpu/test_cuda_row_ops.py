"""The ops that read `row_meta` by the kernels against those in plain Torch: the very same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.row_cases import BRANCHED_SHAPES, SHAPES, keys_of, next_state_of, row_case
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.cuda import draw as cuda_draw
from tide_core.kernels.reference import cycle
from tide_core.kernels.reference import draw as draw_plan

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), [*SHAPES, *BRANCHED_SHAPES])
def test_drafts_are_accepted_as_the_reference_accepts_them(
    num_rows: int, places: int, drafts: int, branches: int, seed: int
) -> None:
    case = row_case(seed, num_rows, places, drafts, branches)
    expected = next_state_of(case)
    found = [part.cuda() for part in expected]
    cuda_cycle.accept_drafts(*(part.cuda() for part in case), branches, *found)
    cycle.accept_drafts(*case, branches, *expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_random_numbers_are_those_of_the_reference_bit_for_bit(
    num_rows: int, places: int, drafts: int, branches: int
) -> None:
    case, keys = row_case(2, num_rows, places, drafts), keys_of(3, places)
    expected = torch.full((draw_plan.NUM_STREAMS, drafts + 1, places), 77.0, dtype=torch.float64)
    found = expected.cuda()
    given = keys, case.starts, case.positions, case.row_meta
    cuda_draw.draw_numbers(*(part.cuda() for part in given), found)
    draw_plan.draw_numbers(*given, expected)
    assert torch.equal(found.cpu(), expected)
