"""The plan of a cycle against the indices that the plain engine makes of the same rows, pass by pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.cycle_cases import BLOCK_SIZE, CASES, cycle_case
from tide_core.kernels import cycle_plan
from tide_core.kv.cache import RowSpan, StepIndex


def planned(about: torch.Tensor, tables: torch.Tensor, drafts: int) -> cycle_plan.CycleParts:
    room = about.shape[1]
    wide, narrow = cycle_plan.sizes(room, drafts)
    buffers = torch.full((wide,), 77), torch.full((narrow,), 77, dtype=torch.int32)
    cycle_plan.plan_cycle(about, tables, BLOCK_SIZE, drafts, *buffers)
    return cycle_plan.split(*buffers, room, drafts)


def spans(about: torch.Tensor, tables: torch.Tensor, num_rows: int, ahead: int | None) -> list[RowSpan]:
    """Of the draft pass `ahead`, or of the deep pass."""
    found = []
    for r in range(num_rows):
        _, start, count, _ = about[:, r].tolist()
        if ahead is None:
            found.append(RowSpan(tables[r].tolist(), start, count + 1))
        elif count > ahead:
            found.append(RowSpan(tables[r].tolist(), start + ahead, 1))
    return found


@pytest.mark.parametrize(("num_rows", "room", "drafts"), CASES)
def test_every_pass_has_the_indices_of_the_plain_engine_and_the_rest_belongs_to_no_row(
    num_rows: int, room: int, drafts: int
) -> None:
    about, tables = cycle_case(7, num_rows, room, drafts)
    parts = planned(about, tables, drafts)
    for ahead in range(drafts):
        index = StepIndex.build(spans(about, tables, num_rows, ahead), BLOCK_SIZE)
        active = len(index.positions)
        assert parts.draft_positions[ahead, :active].tolist() == index.positions.tolist()
        assert parts.draft_slots[ahead].tolist() == index.slots.tolist() + [-1] * (room - active)
        assert parts.draft_lens[ahead].tolist() == index.context_lens.tolist() + [0] * (room - active)
        assert parts.draft_starts[ahead].tolist() == index.query_starts.tolist() + [active] * (room - active)
    index = StepIndex.build(spans(about, tables, num_rows, None), BLOCK_SIZE)
    total, rest = len(index.positions), room * (drafts + 1) - len(index.positions)
    assert parts.positions.tolist() == index.positions.tolist() + [0] * rest
    assert parts.slots.tolist() == index.slots.tolist() + [-1] * rest
    assert parts.lens.tolist() == index.context_lens.tolist() + [0] * (room - num_rows)
    assert parts.starts.tolist() == index.query_starts.tolist() + [total] * (room - num_rows)


@pytest.mark.parametrize(("num_rows", "room", "drafts"), CASES)
def test_tokens_find_where_they_come_from_and_the_deep_state_before_them(num_rows: int, room: int, drafts: int) -> None:
    about, tables = cycle_case(8, num_rows, room, drafts)
    parts = planned(about, tables, drafts)
    assert parts.newest.tolist() == about[0].tolist()
    at = 0
    for r in range(num_rows):
        _, start, count, tracked = about[:, r].tolist()
        slots = [tables[r, p // BLOCK_SIZE].item() * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start + count + 1)]
        assert parts.draft_deep_slots[r] == (slots[start - 1] if start else 0)
        assert parts.draft_distances[:, r].tolist() == [(ahead + 1 if start else 0) for ahead in range(drafts)]
        for ahead in range(count + 1):
            place = start + ahead
            assert parts.sources[at] == ahead * room + r
            assert parts.kept_slots[at] == (slots[place] if tracked else -1)
            assert (parts.distances[at], parts.deep_slots[at]) == ((1, slots[place - 1]) if place else (0, slots[0]))
            at += 1
    assert parts.kept_slots[at:].tolist() == [-1] * (len(parts.kept_slots) - at)
    assert np.all(parts.sources[at:].numpy() == 0)
