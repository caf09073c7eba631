"""The ops that read `row_meta`, in plain Torch, against the sampling package and the rules written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kernels.row_cases import BRANCHED_SHAPES, SHAPES, RowCase, keys_of, next_state_of, row_case
from tide_core.kernels.reference import cycle
from tide_core.kernels.reference import draw as draw_plan
from tide_core.sampling.draw import stream_key, uniform, uniforms


def thresholds(case: RowCase, r: int) -> tuple[float, float]:
    low, high = case.row_meta[[cycle.MIN_SCORE, cycle.EXIT_SCORE]].view(torch.float32)[:, r].tolist()
    return low, high


def accepted_by_rule(case: RowCase, r: int, row: int) -> int:
    """Drafts of place `row` that row r keeps."""
    min_score, exit_score = thresholds(case, r)
    begin = int(case.starts[row])
    for distance in range(int(case.row_meta[cycle.DRAFTS, r])):
        score = float(case.scores[distance, row])
        if not math.isfinite(score) or score < min_score:
            return distance
        if score < exit_score and case.drafted[distance, row] != case.following[begin + distance]:
            return distance
    return int(case.row_meta[cycle.DRAFTS, r])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), [*SHAPES, *BRANCHED_SHAPES])
def test_rows_accept_drafts_by_their_own_thresholds(
    num_rows: int, places: int, drafts: int, branches: int, seed: int
) -> None:
    case = row_case(seed, num_rows, places, drafts, branches)
    carried, next_state = next_state_of(case)
    cycle.accept_drafts(*case, branches, carried, next_state)
    for r in range(places):
        row = first = r - r % branches
        if r >= num_rows:
            assert next_state[:, r].tolist() == [0, 0]
            continue
        if case.row_meta[cycle.LEAVES, r] == cycle.IF_RIGHT and drafts:
            right = [
                b for b in range(first, first + branches) if case.drafted[0, b] == case.following[case.starts[first]]
            ]
            row = right[0] if right else first
        accepted, begin = accepted_by_rule(case, r, row), int(case.starts[row])
        assert next_state[0, r] == case.following[begin + accepted]
        assert next_state[1, r] == case.row_meta[cycle.START, r] + accepted + 1
    assert torch.equal(carried[:, :places].long(), next_state)
    assert (carried[:, places:] == 77).all()


def one_row(scores: list[float], min_score: float, exit_score: float, right: list[bool]) -> RowCase:
    case = row_case(1, 1, 1, len(scores), vocab_size=100)
    case.row_meta[[cycle.MIN_SCORE, cycle.EXIT_SCORE], 0] = torch.tensor([min_score, exit_score]).view(torch.int32)
    case.row_meta[cycle.LEAVES] = cycle.FOR_GOOD
    case.scores[:, 0] = torch.tensor(scores)
    case.following[:-1] = case.drafted[:, 0] + torch.tensor([0 if equal else 1 for equal in right])
    return case


@pytest.mark.parametrize(
    ("scores", "min_score", "exit_score", "right", "accepted"),
    [
        ([0.1, 0.1, 0.1], -math.inf, math.inf, [True, True, True], 3),
        ([0.9, 0.9, 0.9], -math.inf, math.inf, [True, False, True], 1),
        ([0.9, 0.4, 0.9], 0.5, math.inf, [True, True, True], 1),
        ([0.5, 0.5, 0.4], 0.5, math.inf, [True, True, True], 2),
        ([0.9, 0.9, 0.9], -math.inf, 0.9, [False, False, False], 3),
        ([0.9, 0.8, 0.9], -math.inf, 0.9, [False, False, False], 1),
        ([0.9, 0.8, 0.9], -math.inf, 0.9, [False, True, False], 3),
        ([0.9, math.nan, 0.9], -math.inf, 0.5, [True, True, True], 1),
        ([math.inf, 0.9, 0.9], -math.inf, 0.5, [True, True, True], 0),
    ],
)
def test_a_draft_needs_its_least_score_and_a_high_one_needs_no_comparison(
    scores: list[float], min_score: float, exit_score: float, right: list[bool], accepted: int
) -> None:
    case = one_row(scores, min_score, exit_score, right)
    carried, next_state = next_state_of(case)
    cycle.accept_drafts(*case, 1, carried, next_state)
    assert next_state[1, 0] == case.row_meta[cycle.START, 0] + accepted + 1
    assert next_state[0, 0] == case.following[accepted]


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_the_random_numbers_of_a_cycle_are_those_of_the_sampler(
    num_rows: int, places: int, drafts: int, branches: int
) -> None:
    case, keys = row_case(2, num_rows, places, drafts), keys_of(3, places)
    found = torch.full((draw_plan.NUM_STREAMS, drafts + 1, places), 77.0, dtype=torch.float64)
    draw_plan.draw_numbers(keys, case.starts, case.positions, case.row_meta, found)
    meta = case.row_meta[:, :num_rows].numpy()
    outputs = (meta[cycle.START] + 1 - meta[cycle.PROMPT_LEN]).astype(np.uint64)
    steps = outputs + np.arange(drafts + 1, dtype=np.uint64)[:, None]
    expected = uniforms(keys[:, None, :num_rows].numpy().view(np.uint64), steps)
    assert np.array_equal(found[..., :num_rows].numpy(), expected)
    assert (found[..., num_rows:] == 0.0).all()


def test_a_step_is_the_number_of_output_tokens_with_the_drafts_before() -> None:
    case = row_case(3, 1, 1, 2)
    case.row_meta[cycle.PROMPT_LEN, 0] = int(case.positions[0]) - 4  # the newest token is the fifth of the output
    keys = torch.from_numpy(np.array([[stream_key(7, stream)] for stream in range(4)], dtype=np.uint64).view(np.int64))
    found = torch.zeros(4, 3, 1, dtype=torch.float64)
    draw_plan.draw_numbers(keys, case.starts, case.positions, case.row_meta, found)
    assert found[..., 0].tolist() == [[uniform(7, 5 + d, stream) for d in range(3)] for stream in range(4)]
