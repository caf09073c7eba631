"""The ops that read `row_meta`, in plain Torch, against the sampling package and the rules written out."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.kernels.row_cases import (
    BRANCHED_SHAPES,
    SHAPES,
    AdjustCase,
    RowCase,
    adjust_case,
    adjust_logits_of,
    continued,
    logprobs_case,
    next_state_of,
    row_case,
    same_bits,
    sources_of,
)
from tide_core.exits.accept import Compared, accept
from tide_core.kernels.reference import adjust, cycle
from tide_core.kernels.reference import draw as draw_plan
from tide_core.request import Budget, SamplingParams
from tide_core.sampling.adjust import adjusted
from tide_core.sampling.draw import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, stream_key, uniform
from tide_core.sampling.rows import SamplingRow
from tide_core.sampling.sampler import with_logprobs


def accepted_by_rule(case: RowCase, r: int, row: int, differing: int) -> list[float | None]:
    """Of the drafts of place `row` that row r keeps the gap, None where full depth agrees."""
    min_score, margin = case.row_meta[[cycle.MIN_SCORE, cycle.MARGIN]].view(torch.float32)[:, r].tolist()
    [epsilon] = case.row_meta[cycle.EPSILON : cycle.EPSILON + 2, r].clone().view(torch.float64).tolist()
    begin = int(case.starts[row])
    drafts = []
    for distance in range(int(case.counting[r])):
        draft, chosen = int(case.drafted[distance, row]), int(case.following[begin + distance])
        gap = float(case.logits[begin + distance, chosen] - case.logits[begin + distance, draft])
        drafts.append(Compared(float(case.scores[distance, row]), draft == chosen, gap, min_score))
    emitted = int(case.positions[begin]) + 1 - int(case.row_meta[cycle.PROMPT_LEN, r])
    return accept(drafts, Budget(epsilon, margin) if epsilon else None, emitted, differing)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), [*SHAPES, *BRANCHED_SHAPES])
def test_rows_accept_drafts_by_their_own_thresholds_and_budgets(
    num_rows: int, places: int, drafts: int, branches: int, seed: int
) -> None:
    case = continued(row_case(seed, num_rows, places, drafts, branches), branches)
    device_state, next_state = next_state_of(case)
    before, after = device_state.clone(), RowCase(*(part.clone() for part in case))
    cycle.accept_drafts(*after, branches, device_state, next_state)
    following, gaps = case.following.clone(), case.gaps.clone()
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
        start, differing = int(case.row_meta[cycle.START, r]), int(case.row_meta[cycle.DIFFERING, r])
        differing = int(before[2, -1 - start]) if start < 0 else differing
        kept, begin = accepted_by_rule(case, r, row, differing), int(case.starts[row])
        assert next_state[0, r] == case.following[begin + len(kept)]
        assert next_state[1, r] == case.positions[begin] + len(kept) + 1
        assert device_state[2, r] == differing + sum(gap is not None for gap in kept)
        following[begin : begin + len(kept)] = case.drafted[: len(kept), row]
        if case.row_meta[cycle.EPSILON + 1, r]:
            gaps[begin : begin + int(case.counting[r]) + 1] = cycle.AGREES
            gaps[begin : begin + len(kept)] = torch.tensor([cycle.AGREES if gap is None else gap for gap in kept])
    assert torch.equal(device_state[:2, :places].long(), next_state)
    assert torch.equal(device_state[:, places:], before[:, places:])
    assert torch.equal(after.following, following)
    assert torch.equal(after.gaps, gaps)


def one_row(scores: list[float], min_score: float, right: list[bool]) -> RowCase:
    case = row_case(1, 1, 1, len(scores), vocab_size=100)
    case.counting[0] = len(scores)
    case.row_meta[cycle.MIN_SCORE, 0] = torch.tensor(min_score).view(torch.int32)
    case.row_meta[cycle.EPSILON : cycle.EPSILON + 2] = 0
    case.scores[:, 0] = torch.tensor(scores)
    case.following[:-1] = case.drafted[:, 0] + torch.tensor([0 if equal else 1 for equal in right])
    return case


@pytest.mark.parametrize(
    ("scores", "min_score", "right", "accepted"),
    [
        ([0.1, 0.1, 0.1], -math.inf, [True, True, True], 3),
        ([0.9, 0.9, 0.9], -math.inf, [True, False, True], 1),
        ([0.9, 0.4, 0.9], 0.5, [True, True, True], 1),
        ([0.5, 0.5, 0.4], 0.5, [True, True, True], 2),
        ([0.9, math.nan, 0.9], -math.inf, [True, True, True], 1),
        ([math.inf, 0.9, 0.9], -math.inf, [True, True, True], 0),
    ],
)
def test_a_draft_needs_its_least_score(scores: list[float], min_score: float, right: list[bool], accepted: int) -> None:
    case = one_row(scores, min_score, right)
    device_state, next_state = next_state_of(case)
    cycle.accept_drafts(*case, 1, device_state, next_state)
    assert next_state[1, 0] == case.row_meta[cycle.START, 0] + accepted + 1
    assert next_state[0, 0] == case.following[accepted]


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_the_random_numbers_of_a_cycle_are_those_of_the_sampler(
    num_rows: int, places: int, drafts: int, branches: int
) -> None:
    case = row_case(2, num_rows, places, drafts)
    keys = np.array([[stream_key(r - 2, s) for r in range(places)] for s in range(4)], dtype=np.uint64)
    found = torch.full((draw_plan.NUM_STREAMS, drafts + 1, places), 77.0, dtype=torch.float64)
    draw_plan.draw_numbers(torch.from_numpy(keys.view(np.int64)), case.starts, case.positions, case.row_meta, found)
    for r in range(num_rows):
        outputs = int(case.row_meta[cycle.START, r] + 1 - case.row_meta[cycle.PROMPT_LEN, r])
        for stream in range(4):
            far = [distance if stream == DRAFT_STREAM else 0 for distance in range(drafts + 1)]
            expected = [uniform(r - 2, outputs + d, stream, apart) for d, apart in enumerate(far)]
            assert found[stream, :, r].tolist() == expected
    assert (found[..., num_rows:] == 0.0).all()


def test_a_step_is_the_number_of_output_tokens_with_the_drafts_before() -> None:
    case = row_case(3, 1, 1, 2)
    case.row_meta[cycle.PROMPT_LEN, 0] = int(case.positions[0]) - 4  # the newest token is the fifth of the output
    keys = torch.from_numpy(np.array([[stream_key(7, stream)] for stream in range(4)], dtype=np.uint64).view(np.int64))
    found = torch.zeros(4, 3, 1, dtype=torch.float64)
    draw_plan.draw_numbers(keys, case.starts, case.positions, case.row_meta, found)
    for stream in (0, ACCEPT_STREAM, RESIDUAL_STREAM):
        assert found[stream, :, 0].tolist() == [uniform(7, 5 + d, stream) for d in range(3)]


def test_a_draft_that_is_made_again_at_another_distance_is_drawn_with_another_number() -> None:
    case, later = row_case(3, 1, 1, 2), row_case(3, 1, 1, 2)
    later.positions.add_(1)  # the cycle after one token
    keys = torch.from_numpy(np.array([[stream_key(7, stream)] for stream in range(4)], dtype=np.uint64).view(np.int64))
    numbers = []
    for each in (case, later):
        numbers.append(torch.zeros(4, 3, 1, dtype=torch.float64))
        draw_plan.draw_numbers(keys, each.starts, each.positions, each.row_meta, numbers[-1])
    first, second = numbers
    for stream in range(4):
        is_same = first[stream, 1] == second[stream, 0]
        assert is_same.item() == (stream != DRAFT_STREAM)


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_log_probabilities_are_those_of_the_sampler(num_rows: int, places: int, drafts: int, branches: int) -> None:
    case = row_case(4, num_rows, places, drafts)
    logits, sources, following, *found = logprobs_case(5, case, 53, 9)
    cycle.top_logprobs(logits, sources, case.starts, case.row_meta, following, *found)
    ids, logprobs, chosen = found
    for t, source in enumerate(sources.tolist()):
        wanted = int(case.row_meta[cycle.LOGPROBS, source % places])
        if t >= int(case.starts[-1]) or wanted < 0:
            assert ids[t].tolist() == [77] * 9
            assert chosen[t] == 77.0
            continue
        row = SamplingRow(SamplingParams(logprobs=wanted), 0, (), (), ())
        expected = with_logprobs(logits[t], row, int(following[t]))
        listed = zip(ids[t, :wanted].tolist(), logprobs[t, :wanted].tolist(), strict=True)
        assert [pair for pair in listed if pair[1] > -math.inf] == list(expected.top_logprobs)
        assert chosen[t].item() == expected.logprob
        assert ids[t, wanted:].tolist() == [77] * (9 - wanted)


def adjusted_by_sampler(case: RowCase, wanted: AdjustCase, sources: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Row by row, with the drafts before each as output."""
    expected = logits.float().clone()
    for n, source in enumerate(sources.tolist()):
        distance, r = divmod(source, case.row_meta.shape[1])
        row = wanted.rows[r]
        if row is not None and case.row_meta[cycle.DRAFTS, r] >= 0:
            output = [*row.output_ids, *case.drafted[:distance, r].tolist()]
            expected[n] = adjusted(expected[n : n + 1], [dataclasses.replace(row, output_ids=output)])[0]
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), [*SHAPES[:3], (9, 10, 4, 1)])
@pytest.mark.parametrize("shortlisted", [False, True])
def test_logits_are_adjusted_as_the_sampler_adjusts_them(
    num_rows: int, places: int, drafts: int, branches: int, shortlisted: bool, dtype: torch.dtype
) -> None:
    vocab_size = 403
    case = row_case(5, num_rows, places, drafts, vocab_size=vocab_size)
    wanted, sources = adjust_case(6, case, vocab_size), sources_of(case)
    logits = adjust_logits_of(7, len(sources), vocab_size).to(dtype)
    columns = torch.arange(1, vocab_size, 2) if shortlisted else None
    given = logits if columns is None else logits[:, columns].contiguous()
    found = torch.full(given.shape, 77.0)
    of_rows = case.starts, case.positions, case.drafted, case.row_meta
    adjust.adjust_logits(given, columns, sources, *of_rows, wanted.state, found)
    expected = adjusted_by_sampler(case, wanted, sources, logits)
    assert same_bits(found, expected if columns is None else expected[:, columns])


@pytest.mark.parametrize(
    ("params", "seen"),
    [
        (SamplingParams(frequency_penalty=0.5), 1),
        (SamplingParams(presence_penalty=0.5), 0),
        (SamplingParams(repetition_penalty=2.0), 0),
    ],
    ids=["frequency", "presence", "repetition"],
)
def test_a_draft_counts_as_output_after_itself_and_not_before(params: SamplingParams, seen: int) -> None:
    case = row_case(1, 1, 1, 2, vocab_size=50)
    case.drafted[:, 0] = torch.tensor([20, 21])
    wanted = adjust_case(1, case, 50)
    case.row_meta[cycle.ADJUST_SLOT, 0] = 0
    wanted.state.counts[0] = 0
    wanted.state.counts[0, 20] = seen
    wanted.state.penalties[:, 0] = torch.tensor(
        [params.repetition_penalty, params.presence_penalty, params.frequency_penalty], dtype=torch.float64
    )
    logits, found = torch.ones(3, 50), torch.zeros(3, 50)
    of_rows = case.starts, case.positions, case.drafted, case.row_meta
    adjust.adjust_logits(logits, None, torch.arange(3), *of_rows, wanted.state, found)
    assert found[:, 21].tolist() == [1.0, 1.0, 0.5]
    assert found[:, 20].tolist() == ([0.5, 0.0, 0.0] if seen else [1.0, 0.5, 0.5])


@pytest.mark.parametrize("before", [9, 10])
def test_an_entry_applies_below_its_number_of_outputs_and_entries_are_added_in_order(before: int) -> None:
    case = row_case(1, 1, 1, 0, vocab_size=50)
    wanted = adjust_case(1, case, 50)
    case.row_meta[cycle.ADJUST_SLOT, 0] = 0
    case.row_meta[cycle.PROMPT_LEN, 0] = int(case.positions[0]) + 1 - before
    wanted.state.counts[0] = 0
    for part, values in zip(wanted.state[2:], ([4, 4, 4, 6], [1e8, 1.0, -1e8, 2.0], [10, 11, 11, 11]), strict=True):
        part[0, :4] = torch.tensor(values)
    found = torch.zeros(1, 50)
    of_rows = case.starts, case.positions, case.drafted, case.row_meta
    adjust.adjust_logits(torch.zeros(1, 50), None, torch.zeros(1).long(), *of_rows, wanted.state, found)
    assert found[0, 4].item() == (0.0 if before == 9 else float(np.float32(1.0) - np.float32(1e8)))
    assert found[0].count_nonzero() == (1 if before == 9 else 2)
    assert found[0, 6].item() == 2.0


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_counts_are_those_of_all_output_tokens(num_rows: int, places: int, drafts: int, branches: int) -> None:
    case = row_case(8, num_rows, places, drafts, vocab_size=3)
    counts = adjust_case(9, case, 403).state.counts
    device_state, next_state = next_state_of(case)
    cycle.accept_drafts(*case, 1, device_state, next_state)
    expected = counts.clone()
    for r in range(num_rows):
        begin, slot = int(case.starts[r]), int(case.row_meta[cycle.ADJUST_SLOT, r])
        gained = int(next_state[1, r]) - int(case.row_meta[cycle.START, r])
        if slot >= 0:
            expected[slot] += torch.bincount(case.following[begin : begin + gained], minlength=403).short()
    found = counts.clone()
    adjust.count_outputs(case.row_meta, case.starts, case.positions, case.following, next_state, found)
    assert torch.equal(found, expected)


def test_a_count_keeps_the_bit_of_the_prompt_and_ends_at_its_largest() -> None:
    case = row_case(1, 1, 1, 3)
    case.row_meta[cycle.ADJUST_SLOT, 0] = 1
    case.following[:] = torch.tensor([2, 2, 3, 4])
    counts = torch.zeros(2, 6, dtype=torch.int16)
    counts[1, 2], counts[1, 3], counts[1, 4] = -0x8000, 0x7FFF, -1
    next_state = torch.tensor([[4], [int(case.positions[0]) + 4]])
    adjust.count_outputs(case.row_meta, case.starts, case.positions, case.following, next_state, counts)
    assert counts.tolist() == [[0] * 6, [0, 0, -0x8000 + 2, 0x7FFF, -1, 0]]


def test_accepted_drafts_are_counted_where_they_are_given() -> None:
    case = row_case(1, 1, 1, 3)
    case.row_meta[cycle.ADJUST_SLOT, 0] = 0
    case.following[:] = torch.tensor([1, 2, 3, 4])
    case.drafted[:, 0] = torch.tensor([5, 2, 6])
    next_state = torch.tensor([[3], [int(case.positions[0]) + 3]])
    counts = torch.zeros(1, 7, dtype=torch.int16)
    of_rows = case.row_meta, case.starts, case.positions, case.following, next_state
    adjust.count_outputs(*of_rows, counts, case.drafted)
    assert counts.tolist() == [[0, 0, 1, 1, 0, 1, 0]]
