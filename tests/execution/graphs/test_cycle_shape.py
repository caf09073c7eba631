"""The inputs of a cycle: a row that is gone must not run again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tide_core.batch import RowStep
from tide_core.execution.graphs.cycle_shape import CycleInputs, CycleShape, RowPlace
from tide_core.kernels.reference.cycle import DIFFERING, END, EPSILON, MARGIN, MIN_SCORE, PROMPT_LEN
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Budget, ExitPolicy, Request, SamplingParams
from tide_core.sampling.draw import stream_key

BLOCK_SIZE = 16


def step(token: int, start: int, drafts: int = 2, *, budget: Budget | None = None, exits: bool = True) -> RowStep:
    request = Request(f"r{token}", (1,), SamplingParams(), seed=0)
    table = BlockTable(start, [token, token + 1, token + 2])
    policy = ExitPolicy("verified", (0.5,), budget) if exits else ExitPolicy()
    request = dataclasses.replace(request, policy=policy)
    return RowStep(request, table, (token,), (), True, policy, drafts, num_differing=token)


def filled(shape: CycleShape, *fills: list[RowStep]) -> tuple[np.ndarray, ...]:
    """The parts of a buffer that was filled so often."""
    host = np.zeros(shape.size, dtype=np.int32)
    rows = CycleInputs(shape, host)
    for one in fills:
        rows.fill([RowPlace(row, row.num_drafts, row.table.block_ids) for row in one])
    return tuple(part.copy() for part in shape.split(host))


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_row_of_an_earlier_cycle_is_no_row_of_the_next(after: int) -> None:
    shape = CycleShape(4, 2, 3)
    steps = [step(token, 10) for token in (1, 5, 9, 13)]
    meta, *_ = filled(shape, steps, steps[:after])
    expected, *_ = filled(shape, steps[:after])
    assert meta.tolist() == expected.tolist()
    assert (meta[2, after:] == -1).all()


def test_every_branch_has_the_row_its_blocks_and_how_the_row_may_leave() -> None:
    budget = Budget(0.05, 0.25)
    meta, tables = filled(CycleShape(6, 2, 3, 2), [step(1, 14, budget=budget), step(3, 15), step(7, 0, exits=False)])
    assert meta[:4].tolist() == [[1, 1, 3, 3, 7, 7], [14, 14, 15, 15, 0, 0], [2] * 6, [1, 1, 1, 1, 0, 0]]
    assert meta[MIN_SCORE].view(np.float32).tolist() == [-np.inf] * 6
    assert meta[DIFFERING].tolist() == [1, 1, 3, 3, 7, 7]
    assert meta[MARGIN].view(np.float32).tolist() == [0.25] * 2 + [0.0] * 4
    assert meta[EPSILON : EPSILON + 2].T.copy().view(np.float64)[:, 0].tolist() == [0.05] * 2 + [0.0] * 4
    assert meta[END].tolist() == [1 + 128] * 6, "the prompt and the most tokens"
    assert meta[PROMPT_LEN:DIFFERING].tolist() == [[1] * 6, [-1] * 6, [-1] * 6], (
        "prompt length, no adjustments, no log-probabilities"
    )
    assert tables.tolist() == [[1, 2, 3], [1, 2, 3], [3, 4, 5], [3, 4, 5], [7, 8, 9], [7, 8, 9]]


def test_a_row_that_continues_from_the_cycle_before_has_its_place_there() -> None:
    known, behind = step(1, 14), step(3, 15)
    rows = [RowPlace(known, 2, [1, 2]), RowPlace(behind, 1, [3, 4], previous=4)]
    shape = CycleShape(2, 2, 3)
    host = np.zeros(shape.size, dtype=np.int32)
    assert CycleInputs(shape, host).fill(rows) == [0, 3]
    assert shape.split(host)[0][:4].tolist() == [[1, 3], [14, -5], [2, 1], [1, 1]]


def test_the_tables_are_those_of_the_rows_whatever_stood_there_before() -> None:
    shape, rng = CycleShape(4, 0, 8), np.random.default_rng(0)
    host = np.zeros(shape.size, dtype=np.int32)
    rows = CycleInputs(shape, host)
    tables = [BlockTable(start, rng.permutation(100)[:8].tolist()) for start in (0, 40, 90, 120)]
    for _ in range(200):
        table = tables[rng.integers(4)]
        if rng.random() < 0.7:  # as a row grows, gives blocks back and gets others, or begins anew
            table.length = int(rng.integers(0, 8 * BLOCK_SIZE))
        else:
            table.block_ids[int(rng.integers(8))] = int(rng.integers(100))
        shown = [tables[place] for place in rng.permutation(4)[: rng.integers(1, 5)]] if rng.random() < 0.3 else tables
        request = Request("r", (1,), SamplingParams(), seed=0)
        used_by = [table.length // BLOCK_SIZE + 1 for table in shown]
        steps = [RowStep(request, table, (1,), (), True) for table in shown]
        rows.fill([RowPlace(row, 0, row.table.block_ids[:n]) for row, n in zip(steps, used_by, strict=True)])
        for place, (table, used) in enumerate(zip(shown, used_by, strict=True)):
            assert shape.split(host)[1][place, :used].tolist() == table.block_ids[:used]


def test_a_threshold_never_lets_a_lower_score_pass_though_it_is_rounded() -> None:
    threshold = 0.1 + 1e-9
    policy = ExitPolicy("verified", (threshold,))
    request = Request("r", (1,), SamplingParams(threshold=threshold), seed=0, policy=policy)
    row = RowStep(request, BlockTable(3, [5]), (1,), (), True, policy, 1)
    meta, _ = filled(CycleShape(1, 1, 1), [row])
    assert float(meta[MIN_SCORE].view(np.float32)[0]) >= threshold


def test_sampled_rows_have_their_settings_and_a_key_for_each_random_stream() -> None:
    shape = CycleShape(2, 1, 3, samples=True)
    request = Request("r", (1,), SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1), seed=3)
    row = RowStep(request, BlockTable(3, [5, 6, 7]), (1,), (), True, num_drafts=1)
    host = np.zeros(shape.size, dtype=np.int32)
    CycleInputs(shape, host).fill([RowPlace(row, 1, row.table.block_ids)])
    settings, keys = shape.sampling(host, np.float64, np.int64)
    assert settings[:, 0].tolist() == [0.7, 5.0, 0.9, 0.1, -np.inf]
    assert keys[:, 0].astype(np.uint64).tolist() == [stream_key(3, stream) for stream in (0, 1, 2, 3)]
    assert not settings[:, 1].any()


def test_suffix_drafts_stand_for_themselves_and_are_gone_with_the_next_fill() -> None:
    shape = CycleShape(2, 3, 3, has_suffix=True, by_exits=False)
    host = np.zeros(shape.size, dtype=np.int32)
    inputs = CycleInputs(shape, host)
    none = shape.suffix_of(host).copy()
    assert (none == -1).all(), "token 0, whose place is in no shortlist"
    copying = step(1, 14, drafts=3)._replace(suffix_drafts=(40, 41, 42))
    inputs.fill([RowPlace(copying, 3, [1, 2]), RowPlace(step(3, 15, drafts=0), 0, [3, 4])])
    assert shape.suffix_of(host).tolist() == [[-41, -1], [-42, -1], [-43, -1]]
    inputs.fill([RowPlace(copying, 3, [1, 2], previous=0)])
    assert shape.suffix_of(host).tolist() == none.tolist(), "it continues with what is not known yet"


def test_beside_suffix_drafts_those_of_exits_stay() -> None:
    shape = CycleShape(2, 2, 3, has_suffix=True)
    host = np.zeros(shape.size, dtype=np.int32)
    rows = [RowPlace(step(1, 14)._replace(suffix_drafts=(40, 41)), 2, [1, 2]), RowPlace(step(3, 15), 2, [3, 4])]
    CycleInputs(shape, host).fill(rows)
    assert shape.suffix_of(host).tolist() == [[-41, 0], [-42, 0]]
