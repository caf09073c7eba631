"""The host's buffer of a cycle keeps what nobody has changed and no more: a row that is gone must not run again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.twin import twin_kernels
from tide_core.batch import RowStep
from tide_core.engine.branches import SPARE_BLOCKS, Branches
from tide_core.engine.cycle_room import CycleRoom, CycleRows
from tide_core.kv.block_manager import BlockTable
from tide_core.kv.cache import KVLayout, PagedKV
from tide_core.request import ExitPolicy, Request, SamplingParams

BLOCK_SIZE = 16


def step(token: int, start: int, drafts: int = 2, *, leaves_at: float = np.inf) -> RowStep:
    request = Request(f"r{token}", (1,), SamplingParams(), seed=0)
    table, policy = BlockTable([start], [token, token + 1, token + 2]), ExitPolicy("verified", (0.5,), (leaves_at,))
    return RowStep(request, table, (token,), (), True, policy, drafts)


def filled(room: CycleRoom, *fills: list[RowStep], branches: Branches | None = None) -> tuple[np.ndarray, ...]:
    """The parts of a buffer that was filled so often."""
    host = np.zeros(room.size, dtype=np.int32)
    rows = CycleRows(room, host, BLOCK_SIZE, branches)
    for one in fills:
        rows.fill(one)
    return tuple(part.copy() for part in room.split(host))


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_row_of_an_earlier_cycle_is_no_row_of_the_next(after: int) -> None:
    room = CycleRoom(4, 2, 3)
    steps = [step(token, 10) for token in (1, 5, 9, 13)]
    about, *_ = filled(room, steps, steps[:after])
    expected, *_ = filled(room, steps[:after])
    assert about.tolist() == expected.tolist()
    assert (about[2, after:] == -1).all()


def test_slots_that_an_earlier_branch_copied_are_not_copied_again() -> None:
    cache = PagedKV([KVLayout(1, 4, 4)], 8 + SPARE_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    branches = Branches(cache, twin_kernels())
    room = CycleRoom(4, 2, 3, 2, BLOCK_SIZE)
    early, late = [step(1, 14), step(3, 9)], [step(1, 5)]
    *_, copies, returns = filled(room, early, late, branches=branches)
    *_, expected, expected_returns = filled(room, late, branches=branches)
    assert returns[:2].tolist() == expected_returns[:2].tolist()
    assert copies.tolist() == expected.tolist()
    assert (copies >= 0).sum() == 2 * 5


def test_a_branch_comes_back_if_its_token_is_the_one_that_follows_but_never_to_a_row_that_may_leave_for_good() -> None:
    cache = PagedKV([KVLayout(1, 4, 4)], 8 + SPARE_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    room, spare = CycleRoom(4, 2, 3, 2, BLOCK_SIZE), 8 * BLOCK_SIZE
    rows = [step(1, 14, leaves_at=0.9), step(3, 15)]
    *_, returns = filled(room, rows, branches=Branches(cache, twin_kernels()))
    expected = [[spare + 2 * 16 + 15, spare + 3 * 16, spare + 3 * 16 + 1], [3 * 16 + 15, 4 * 16, 4 * 16 + 1]]
    assert returns[:2, :3].tolist() == expected
    assert returns[2:, :3].tolist() == [[6, 6, 6], [3, 3, 3]], "said behind 2 branches of 3 tokens, tried by the fourth"
    assert (returns[:2, 3:] == -1).all()


def test_the_tables_are_those_of_the_rows_whatever_stood_there_before() -> None:
    room, rng = CycleRoom(4, 0, 8), np.random.default_rng(0)
    host = np.zeros(room.size, dtype=np.int32)
    rows = CycleRows(room, host, BLOCK_SIZE)
    tables = [BlockTable([start], rng.permutation(100)[:8].tolist()) for start in (0, 40, 90, 120)]
    for _ in range(200):
        table = tables[rng.integers(4)]
        if rng.random() < 0.7:  # as a row grows, gives blocks back and gets others, or begins anew
            table.lengths[0] = int(rng.integers(0, 8 * BLOCK_SIZE))
        else:
            table.block_ids[int(rng.integers(8))] = int(rng.integers(100))
        shown = [tables[place] for place in rng.permutation(4)[: rng.integers(1, 5)]] if rng.random() < 0.3 else tables
        request = Request("r", (1,), SamplingParams(), seed=0)
        rows.fill([RowStep(request, table, (1,), (), True) for table in shown])
        for place, table in enumerate(shown):
            used = table.num_valid // BLOCK_SIZE + 1
            assert room.split(host)[1][place, :used].tolist() == table.block_ids[:used]
