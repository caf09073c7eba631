"""The plan of a cycle by the kernel against the one in plain Torch: whole numbers, so the very same ones."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cycle_cases import (
    BLOCK_SIZE,
    BRANCHED,
    CASES,
    branched_case,
    carried_case,
    cycle_case,
    no_row_carried,
)
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.reference import cycle as cycle_plan

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


def same_plans(
    row_meta: torch.Tensor, next_state: torch.Tensor, tables: torch.Tensor, drafts: int, branches: int
) -> None:
    """By the kernel and by the reference, with the tables that branches get."""
    wide, narrow = cycle_plan.sizes(row_meta.shape[1], drafts, BLOCK_SIZE if branches > 1 else 0)
    expected = torch.zeros(wide, dtype=torch.int64), torch.zeros(narrow, dtype=torch.int32)
    found = [torch.full_like(part, 99, device="cuda") for part in expected]
    theirs = tables.cuda()
    cuda_cycle.plan_cycle(row_meta.cuda(), next_state.cuda(), theirs, BLOCK_SIZE, drafts, *found, branches, 900)
    cycle_plan.plan_cycle(row_meta, next_state, tables, BLOCK_SIZE, drafts, *expected, branches, 900)
    for one, other in zip((*found, theirs), (*expected, tables), strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("num_rows", "places", "drafts"), CASES)
def test_a_cycle_is_planned_as_the_reference_plans_it(num_rows: int, places: int, drafts: int, seed: int) -> None:
    row_meta, tables = cycle_case(seed, num_rows, places, drafts)
    same_plans(row_meta, no_row_carried(), tables, drafts, 1)
    same_plans(*carried_case(seed, row_meta), tables, drafts, 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("num_rows", "drafts", "branches"), BRANCHED)
def test_branches_are_planned_as_the_reference_plans_them(num_rows: int, drafts: int, branches: int, seed: int) -> None:
    same_plans(*_with_carried(*branched_case(seed, num_rows, drafts, branches)), drafts, branches)


def _with_carried(row_meta: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return row_meta, no_row_carried(), tables


def test_more_rows_than_it_takes_are_refused_by_name() -> None:
    row_meta = torch.zeros(5, 257, dtype=torch.int32, device="cuda")
    wide, narrow = (torch.zeros(size, device="cuda") for size in cycle_plan.sizes(257, 0))
    next_state = no_row_carried().cuda()
    with pytest.raises(ValueError, match=r"row_meta.*at most 256 rows"):
        cuda_cycle.plan_cycle(row_meta, next_state, torch.zeros_like(row_meta.T), 16, 0, wide.long(), narrow.int())


@pytest.mark.parametrize(("rows", "drafts"), [(1, 0), (1, 5), (24, 3), (256, 0)])
def test_the_tokens_of_a_deep_pass_are_those_of_the_reference(rows: int, drafts: int) -> None:
    generator = torch.Generator().manual_seed(rows + drafts)
    newest, shortlist = (torch.randint(50000, (size,), generator=generator) for size in (rows, 300))
    places = torch.randint(-400, 300, (drafts, rows), generator=generator)  # suffix drafts among them
    sources = torch.randperm(rows * (drafts + 1), generator=generator)
    expected = torch.zeros_like(places), torch.zeros_like(sources)
    cycle_plan.pending_tokens(newest, places, shortlist, sources, *expected)
    found = [torch.full_like(part, 99, device="cuda") for part in expected]
    given = (part.cuda() for part in (newest, places, shortlist, sources))
    cuda_cycle.pending_tokens(*given, *found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)
