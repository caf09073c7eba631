"""The plan of a cycle against the indices that the plain engine makes of the same rows, pass by pass."""

from __future__ import annotations

import numpy as np
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
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kv.cache import RowSpan, StepIndex


def planned(
    row_meta: torch.Tensor,
    tables: torch.Tensor,
    drafts: int,
    *,
    branches: int = 1,
    next_state: torch.Tensor | None = None,
) -> cycle_plan.CycleParts:
    places, branch_size = row_meta.shape[1], BLOCK_SIZE if branches > 1 else 0
    wide, narrow = cycle_plan.sizes(places, drafts, branch_size)
    buffers = torch.full((wide,), 77), torch.full((narrow,), 77, dtype=torch.int32)
    next_state = no_row_carried() if next_state is None else next_state
    cycle_plan.plan_cycle(row_meta, next_state, tables, BLOCK_SIZE, drafts, *buffers, branches, 900)
    return cycle_plan.split(*buffers, places, drafts, branch_size)


def spans(row_meta: torch.Tensor, tables: torch.Tensor, num_rows: int, ahead: int | None) -> list[RowSpan]:
    """Of the draft pass `ahead`, or of the deep pass."""
    found = []
    for r in range(num_rows):
        _, start, count, *_ = row_meta[:, r].tolist()
        if ahead is None:
            found.append(RowSpan(tables[r].tolist(), start, count + 1))
        elif count > ahead:
            found.append(RowSpan(tables[r].tolist(), start + ahead, 1))
    return found


@pytest.mark.parametrize(("num_rows", "places", "drafts"), CASES)
def test_every_pass_has_the_indices_of_the_plain_engine_and_the_rest_belongs_to_no_row(
    num_rows: int, places: int, drafts: int
) -> None:
    row_meta, tables = cycle_case(7, num_rows, places, drafts)
    parts = planned(row_meta, tables, drafts)
    for ahead in range(drafts):
        index = StepIndex.build(spans(row_meta, tables, num_rows, ahead), BLOCK_SIZE)
        active = len(index.positions)
        assert parts.draft_positions[ahead, :active].tolist() == index.positions.tolist()
        assert parts.draft_slots[ahead].tolist() == index.slots.tolist() + [-1] * (places - active)
        assert parts.draft_lens[ahead].tolist() == index.context_lens.tolist() + [0] * (places - active)
        assert parts.draft_starts[ahead].tolist() == index.query_starts.tolist() + [active] * (places - active)
    index = StepIndex.build(spans(row_meta, tables, num_rows, None), BLOCK_SIZE)
    total, rest = len(index.positions), places * (drafts + 1) - len(index.positions)
    assert parts.positions.tolist() == index.positions.tolist() + [0] * rest
    assert parts.slots.tolist() == index.slots.tolist() + [-1] * rest
    assert parts.lens.tolist() == index.context_lens.tolist() + [0] * (places - num_rows)
    assert parts.starts.tolist() == index.query_starts.tolist() + [total] * (places - num_rows)


@pytest.mark.parametrize(("num_rows", "places", "drafts"), CASES)
def test_tokens_find_where_they_come_from_and_the_deep_state_before_them(
    num_rows: int, places: int, drafts: int
) -> None:
    row_meta, tables = cycle_case(8, num_rows, places, drafts)
    parts = planned(row_meta, tables, drafts)
    assert parts.newest.tolist() == row_meta[0].tolist()
    at = 0
    for r in range(num_rows):
        _, start, count, tracked, end = row_meta[:, r].tolist()
        assert parts.counting[r] == max(0, min(count, end - start - 2))
        slots = [tables[r, p // BLOCK_SIZE].item() * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start + count + 1)]
        assert parts.draft_deep_slots[r] == (slots[start - 1] if start else 0)
        assert parts.draft_distances[:, r].tolist() == [(ahead + 1 if start else 0) for ahead in range(drafts)]
        for ahead in range(count + 1):
            place = start + ahead
            assert parts.sources[at] == ahead * places + r
            assert parts.kept_slots[at] == (slots[place] if tracked else -1)
            assert (parts.distances[at], parts.deep_slots[at]) == ((1, slots[place - 1]) if place else (0, slots[0]))
            at += 1
    assert parts.kept_slots[at:].tolist() == [-1] * (len(parts.kept_slots) - at)
    assert np.all(parts.sources[at:].numpy() == 0)
    assert parts.counting[num_rows:].tolist() == [-1] * (places - num_rows)


@pytest.mark.parametrize(("num_rows", "places", "drafts"), CASES)
def test_a_row_that_the_cycle_before_left_somewhere_is_planned_as_if_the_host_knew(
    num_rows: int, places: int, drafts: int
) -> None:
    row_meta, tables = cycle_case(9, num_rows, places, drafts)
    told, next_state = carried_case(9, row_meta)
    assert num_rows == 0 or not torch.equal(told, row_meta)
    expected, found = planned(row_meta, tables, drafts), planned(told, tables, drafts, next_state=next_state)
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("num_rows", "drafts", "branches"), BRANCHED)
def test_a_branch_writes_to_blocks_of_its_own_and_comes_back_if_its_row_keeps_what_is_right(
    num_rows: int, drafts: int, branches: int
) -> None:
    row_meta, tables = branched_case(10, num_rows, drafts, branches)
    own = tables.clone()
    parts = planned(row_meta, tables, drafts, branches=branches)
    spare: list[int] = []
    for r in range(num_rows * branches):
        first, start, leaves = r - r % branches, int(row_meta[1, r]), int(row_meta[3, r])
        begin, places = int(parts.starts[r]), range(start, start + drafts + 1)
        written = sorted({place // BLOCK_SIZE for place in places})
        copies = parts.copies[:, r * BLOCK_SIZE : (r + 1) * BLOCK_SIZE]
        returns = parts.returns[:, begin : begin + drafts + 1]
        if r == first:
            assert torch.equal(tables[r], own[r])
            assert (copies == -1).all()
            assert (returns[:2] == -1).all()
            continue
        spare += tables[r, written].tolist()
        kept = [block for block in range(tables.shape[1]) if block not in written]
        assert torch.equal(tables[r, kept], own[r, kept])
        slots = [[int(t[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in places] for t in (tables[r], own[r])]
        assert parts.slots[begin : begin + drafts + 1].tolist() == slots[0]
        before = [
            [int(t[start // BLOCK_SIZE]) * BLOCK_SIZE + offset for offset in range(start % BLOCK_SIZE)]
            for t in (own[r], tables[r])
        ]
        assert copies.tolist() == [some + [-1] * (BLOCK_SIZE - len(some)) for some in before]
        if leaves == cycle_plan.IF_RIGHT:
            claims = [[int(parts.starts[first])] * (drafts + 1), [r] * (drafts + 1)]
            assert returns.tolist() == slots + claims
        else:
            assert (returns[:2] == -1).all()
    assert len(spare) == len({*spare})
    assert all(block >= 900 for block in spare)
