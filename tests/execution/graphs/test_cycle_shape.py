"""The host's buffer of a cycle keeps what nobody has changed and no more: a row that is gone must not run again."""

from __future__ import annotations

import numpy as np
import pytest

from tide_core.batch import RowStep
from tide_core.execution.graphs.cycle_shape import CycleInputs, CycleShape, RowPlace
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, Request, SamplingParams

BLOCK_SIZE = 16


def step(token: int, start: int, drafts: int = 2, *, leaves_at: float = np.inf, exits: bool = True) -> RowStep:
    request = Request(f"r{token}", (1,), SamplingParams(), seed=0)
    table = BlockTable([start], [token, token + 1, token + 2])
    policy = ExitPolicy("verified", (0.5,), (leaves_at,)) if exits else ExitPolicy()
    return RowStep(request, table, (token,), (), True, policy, drafts)


def filled(room: CycleShape, *fills: list[RowStep]) -> tuple[np.ndarray, ...]:
    """The parts of a buffer that was filled so often."""
    host = np.zeros(room.size, dtype=np.int32)
    rows = CycleInputs(room, host)
    for one in fills:
        rows.fill([RowPlace(row, row.num_drafts, row.table.block_ids) for row in one])
    return tuple(part.copy() for part in room.split(host))


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_row_of_an_earlier_cycle_is_no_row_of_the_next(after: int) -> None:
    room = CycleShape(4, 2, 3)
    steps = [step(token, 10) for token in (1, 5, 9, 13)]
    about, *_ = filled(room, steps, steps[:after])
    expected, *_ = filled(room, steps[:after])
    assert about.tolist() == expected.tolist()
    assert (about[2, after:] == -1).all()


def test_every_branch_is_told_the_row_and_its_blocks_and_how_the_row_may_leave() -> None:
    about, tables = filled(CycleShape(6, 2, 3, 2), [step(1, 14, leaves_at=0.9), step(3, 15), step(7, 0, exits=False)])
    assert about.tolist() == [[1, 1, 3, 3, 7, 7], [14, 14, 15, 15, 0, 0], [2] * 6, [2, 2, 1, 1, 0, 0]]
    assert tables.tolist() == [[1, 2, 3], [1, 2, 3], [3, 4, 5], [3, 4, 5], [7, 8, 9], [7, 8, 9]]


def test_of_a_row_that_goes_on_from_the_cycle_before_its_place_there_is_told() -> None:
    known, behind = step(1, 14), step(3, 15)
    rows = [RowPlace(known, 2, [1, 2]), RowPlace(behind, 1, [3, 4], previous=4)]
    room = CycleShape(2, 2, 3)
    host = np.zeros(room.size, dtype=np.int32)
    assert CycleInputs(room, host).fill(rows) == [0, 3]
    assert room.split(host)[0].tolist() == [[1, 3], [14, -5], [2, 1], [1, 1]]


def test_the_tables_are_those_of_the_rows_whatever_stood_there_before() -> None:
    room, rng = CycleShape(4, 0, 8), np.random.default_rng(0)
    host = np.zeros(room.size, dtype=np.int32)
    rows = CycleInputs(room, host)
    tables = [BlockTable([start], rng.permutation(100)[:8].tolist()) for start in (0, 40, 90, 120)]
    for _ in range(200):
        table = tables[rng.integers(4)]
        if rng.random() < 0.7:  # as a row grows, gives blocks back and gets others, or begins anew
            table.lengths[0] = int(rng.integers(0, 8 * BLOCK_SIZE))
        else:
            table.block_ids[int(rng.integers(8))] = int(rng.integers(100))
        shown = [tables[place] for place in rng.permutation(4)[: rng.integers(1, 5)]] if rng.random() < 0.3 else tables
        request = Request("r", (1,), SamplingParams(), seed=0)
        used_by = [table.num_valid // BLOCK_SIZE + 1 for table in shown]
        steps = [RowStep(request, table, (1,), (), True) for table in shown]
        rows.fill([RowPlace(row, 0, row.table.block_ids[:n]) for row, n in zip(steps, used_by, strict=True)])
        for place, (table, used) in enumerate(zip(shown, used_by, strict=True)):
            assert room.split(host)[1][place, :used].tolist() == table.block_ids[:used]
