"""The plan of a cycle by the kernel against the one in plain Torch: whole numbers, so the very same ones."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cycle_cases import BLOCK_SIZE, CASES, cycle_case
from tide_core.kernels import cuda_cycle, cycle_plan

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("num_rows", "room", "drafts"), CASES)
def test_a_cycle_is_planned_as_the_reference_plans_it(num_rows: int, room: int, drafts: int, seed: int) -> None:
    about, tables = cycle_case(seed, num_rows, room, drafts)
    wide, narrow = cycle_plan.sizes(room, drafts)
    expected = torch.zeros(wide, dtype=torch.int64), torch.zeros(narrow, dtype=torch.int32)
    cycle_plan.plan_cycle(about, tables, BLOCK_SIZE, drafts, *expected)
    found = [torch.full_like(part, 99, device="cuda") for part in expected]
    cuda_cycle.plan_cycle(about.cuda(), tables.cuda(), BLOCK_SIZE, drafts, *found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


def test_more_rows_than_it_takes_are_refused_by_name() -> None:
    about = torch.zeros(4, 257, dtype=torch.int32, device="cuda")
    wide, narrow = (torch.zeros(size, device="cuda") for size in cycle_plan.sizes(257, 0))
    with pytest.raises(ValueError, match=r"about.*at most 256 rows"):
        cuda_cycle.plan_cycle(about, torch.zeros_like(about.T), 16, 0, wide.long(), narrow.int())


@pytest.mark.parametrize(("rows", "drafts"), [(1, 0), (1, 5), (24, 3), (256, 0)])
def test_the_tokens_of_a_deep_pass_are_those_of_the_reference(rows: int, drafts: int) -> None:
    generator = torch.Generator().manual_seed(rows + drafts)
    newest, shortlist = (torch.randint(50000, (size,), generator=generator) for size in (rows, 300))
    places = torch.randint(300, (drafts, rows), generator=generator)
    sources = torch.randperm(rows * (drafts + 1), generator=generator)
    expected = torch.zeros_like(places), torch.zeros_like(sources)
    cycle_plan.pending_tokens(newest, places, shortlist, sources, *expected)
    found = [torch.full_like(part, 99, device="cuda") for part in expected]
    given = (part.cuda() for part in (newest, places, shortlist, sources))
    cuda_cycle.pending_tokens(*given, *found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)
