"""The one rule by which drafts are kept, and its twin on the device."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from tide_core.batch import RowStep
from tide_core.exits.accept import Thresholds, accept, cycle_thresholds, drafting_thresholds
from tide_core.kernels.reference.cycle import (
    DRAFTS,
    EXIT_SCORE,
    IF_RIGHT,
    LEAVES,
    MIN_SCORE,
    MOST_ROWS,
    NUM_META,
    accept_drafts,
)
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, Request, SamplingParams

pytestmark = pytest.mark.unit

VERIFIED = ExitPolicy("verified", (0.2,), (math.inf,))
BOUNDED = ExitPolicy("bounded", (0.2,), (0.9,), 0.02)


def request(policy: ExitPolicy, threshold: float | None = None) -> Request:
    return Request("r", (1,), SamplingParams(threshold=threshold), seed=0, policy=policy)


def accepted_of(drafts: list[tuple[float, bool]], thresholds: Thresholds) -> int:
    return accept((*draft, thresholds) for draft in drafts)


def test_drafts_are_accepted_up_to_the_first_that_full_depth_does_not_choose() -> None:
    assert accepted_of([(0.1, True), (0.9, True), (0.9, False), (0.9, True)], Thresholds()) == 2


def test_a_draft_below_the_least_score_does_not_count_though_full_depth_agrees() -> None:
    assert accepted_of([(0.6, True), (0.4, True)], Thresholds(min_score=0.5)) == 1


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_draft_whose_score_is_not_finite_never_counts(score: float) -> None:
    assert accepted_of([(score, True)], Thresholds()) == 0
    assert accepted_of([(score, True)], Thresholds(exit_score=0.0)) == 0


def test_a_draft_at_the_exit_score_is_kept_whatever_full_depth_chooses() -> None:
    assert accepted_of([(0.9, False), (0.89, False)], Thresholds(exit_score=0.9)) == 1


def test_a_whole_cycle_ignores_the_calibrated_threshold_unless_a_bound_was_certified_with_it() -> None:
    step = RowStep(request(VERIFIED), BlockTable(4, [0]), (7,), (), True, VERIFIED)
    assert drafting_thresholds(step, 0) == Thresholds(0.2, math.inf)
    assert cycle_thresholds(request(VERIFIED), VERIFIED) == Thresholds(-math.inf, math.inf)
    assert cycle_thresholds(request(VERIFIED, 0.5), VERIFIED) == Thresholds(0.5, math.inf)
    assert cycle_thresholds(request(BOUNDED), BOUNDED) == Thresholds(0.2, 0.9)
    assert cycle_thresholds(request(ExitPolicy()), ExitPolicy()) == Thresholds()


def test_the_twin_on_the_device_accepts_what_the_rule_accepts() -> None:
    random, num_rows, num_drafts, seen = Random(0), 6, 3, set[int]()
    specials = (math.nan, math.inf, -math.inf)
    for _ in range(60):
        row_meta = torch.zeros((NUM_META, num_rows), dtype=torch.int32)
        limits = [Thresholds(random.choice((-math.inf, 0.3)), random.choice((math.inf, 0.8))) for _ in range(num_rows)]
        counts = sorted([random.randint(0, num_drafts) for _ in range(num_rows)], reverse=True)
        row_meta[DRAFTS], row_meta[LEAVES] = torch.tensor(counts), IF_RIGHT
        row_meta[MIN_SCORE] = torch.tensor([limit.min_score for limit in limits]).view(torch.int32)
        row_meta[EXIT_SCORE] = torch.tensor([limit.exit_score for limit in limits]).view(torch.int32)
        starts = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int()
        num_tokens = num_rows * (num_drafts + 1)
        positions = torch.zeros(num_tokens, dtype=torch.int64)
        for row, begin in enumerate(starts[:-1].tolist()):
            positions[begin : begin + counts[row] + 1] = 10 * row + torch.arange(counts[row] + 1)
        drafted = torch.randint(0, 2, (num_drafts, num_rows))
        following = torch.randint(0, 2, (num_tokens,))
        scores = torch.rand(num_drafts, num_rows)
        scores[random.randrange(num_drafts), random.randrange(num_rows)] = random.choice(specials)
        state, next_state = (
            torch.zeros((2, MOST_ROWS), dtype=torch.int32),
            torch.zeros((2, num_rows), dtype=torch.int64),
        )
        accept_drafts(
            row_meta, torch.tensor(counts).int(), starts, positions, drafted, scores, following, 1, state, next_state
        )
        for row, (count, limit) in enumerate(zip(counts, limits, strict=True)):
            begin = int(starts[row])
            pairs = [(float(scores[d, row]), bool(drafted[d, row] == following[begin + d])) for d in range(count)]
            accepted = accepted_of(pairs, limit)
            expected = [int(following[begin + accepted]), 10 * row + accepted + 1]
            assert next_state[:, row].tolist() == expected == state[:, row].tolist()
            seen.add(accepted)
    assert seen == {0, 1, 2, 3}
