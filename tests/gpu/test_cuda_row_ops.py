"""The ops that read `row_meta` by the kernels against those in plain Torch: the very same numbers."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.kernels.row_cases import (
    BRANCHED_SHAPES,
    SHAPES,
    RowCase,
    adjust_case,
    adjust_logits_of,
    continued,
    keys_of,
    logprobs_case,
    next_state_of,
    row_case,
    same_bits,
    sources_of,
)
from tide_core.kernels.cuda import adjust as cuda_adjust
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.cuda import draw as cuda_draw
from tide_core.kernels.reference import adjust, cycle
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference.adjust import AdjustState

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), [*SHAPES, *BRANCHED_SHAPES])
def test_drafts_are_accepted_as_the_reference_accepts_them(
    num_rows: int, places: int, drafts: int, branches: int, seed: int, dtype: torch.dtype
) -> None:
    case = continued(row_case(seed, num_rows, places, drafts, branches), branches)
    case = case._replace(logits=case.logits.to(dtype))
    expected = next_state_of(case)
    found, theirs = [part.cuda() for part in expected], [part.cuda() for part in case]
    cuda_cycle.accept_drafts(*theirs, branches, *found)
    cycle.accept_drafts(*case, branches, *expected)
    for one, other in zip([*found, *theirs], [*expected, *case], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0.0, atol=0.0, equal_nan=True)  # some scores are no numbers


@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_random_numbers_are_those_of_the_reference_bit_for_bit(
    num_rows: int, places: int, drafts: int, branches: int
) -> None:
    case, keys = row_case(2, num_rows, places, drafts), keys_of(3, places)
    expected = torch.full((draw_plan.NUM_STREAMS, drafts + 1, places), 77.0, dtype=torch.float64)
    found = expected.cuda()
    given = keys, case.starts, case.positions, case.row_meta
    cuda_draw.draw_numbers(*(part.cuda() for part in given), found)
    draw_plan.draw_numbers(*given, expected)
    assert torch.equal(found.cpu(), expected)


def same_logprobs(logits: Tensor, given: tuple[Tensor, ...], found: list[Tensor], expected: list[Tensor]) -> None:
    """The same tokens; their log-probabilities are those in float64, as float32 has them."""
    wide = [expected[0], *(part.double() for part in expected[1:])]
    cycle.top_logprobs(logits.double(), *given, *wide)
    assert torch.equal(found[0].cpu(), wide[0])
    for one, other in zip(found[1:], wide[1:], strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [20, 403, 49152, 70001])
@pytest.mark.parametrize("strided", [False, True])
def test_log_probabilities_are_those_of_the_reference(vocab_size: int, strided: bool, dtype: torch.dtype) -> None:
    case = row_case(4, 7, 8, 3)
    logits, sources, following, *expected = logprobs_case(5, case, vocab_size, 20)
    logits = logits.to(dtype)
    theirs = logits.cuda()
    if strided:
        theirs = torch.zeros(len(logits), vocab_size + 3, dtype=dtype, device="cuda")[:, 1:-2].copy_(logits)
    found = [part.cuda() for part in expected]
    given = sources, case.starts, case.row_meta, following
    cuda_cycle.top_logprobs(theirs, *(part.cuda() for part in given), *found)
    same_logprobs(logits, given, found, expected)


def test_the_likeliest_tokens_are_found_where_all_lie_in_the_columns_of_few_threads() -> None:
    case = row_case(4, 1, 1, 0)
    logits, sources, following, *expected = logprobs_case(5, case, 700_000, 20)
    ids = torch.arange(700_000)
    logits[0] = torch.where(ids // 8 % 1024 < 21, 10.0 + (ids % 977) / 1000, 0.0)  # far more candidates than fit
    found = [part.cuda() for part in expected]
    given = sources, case.starts, case.row_meta, following
    cuda_cycle.top_logprobs(logits.cuda(), *(part.cuda() for part in given), *found)
    same_logprobs(logits, given, found, expected)


def on_gpu(state: AdjustState) -> AdjustState:
    return AdjustState(*(part.cuda() for part in state))


def same_adjusted(
    logits: Tensor,
    columns: Tensor | None,
    sources: Tensor,
    case: RowCase,
    state: AdjustState,
    *,
    in_place: bool = False,
) -> None:
    """By the kernel and by the reference. `logits` lie on the GPU."""
    of_rows = sources, case.starts, case.positions, case.drafted, case.row_meta
    expected = torch.full(logits.shape, 77.0)
    adjust.adjust_logits(logits.cpu(), columns, *of_rows, state, expected)
    found = logits if in_place else torch.full(logits.shape, 77.0, device=logits.device)
    theirs = None if columns is None else columns.cuda()
    cuda_adjust.adjust_logits(logits, theirs, *(part.cuda() for part in of_rows), on_gpu(state), found)
    assert same_bits(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [403, 4096, 5001])
@pytest.mark.parametrize("shortlisted", [False, True])
def test_logits_are_adjusted_as_the_reference_adjusts_them(
    vocab_size: int, shortlisted: bool, dtype: torch.dtype
) -> None:
    case = row_case(5, 9, 10, 4, vocab_size=vocab_size)
    state, sources = adjust_case(6, case, vocab_size).state, sources_of(case)
    columns = torch.arange(1, vocab_size, 2) if shortlisted else None
    width = vocab_size if columns is None else len(columns)
    logits = adjust_logits_of(7, len(sources), width).to("cuda", dtype)
    same_adjusted(logits, columns, sources, case, state)
    strided = torch.zeros(len(sources), width + 3, dtype=dtype, device="cuda")[:, 1 : width + 1].copy_(logits)
    same_adjusted(strided, columns, sources, case, state)


def test_logits_may_be_adjusted_where_they_lie() -> None:
    case = row_case(5, 9, 10, 4, vocab_size=3000)
    state, sources = adjust_case(6, case, 3000).state, sources_of(case)
    same_adjusted(adjust_logits_of(7, len(sources), 3000).cuda(), None, sources, case, state, in_place=True)


def test_all_entries_of_a_slot_may_be_used_and_an_id_may_come_again() -> None:
    case = row_case(5, 1, 1, 256, vocab_size=600)
    state, sources = adjust_case(6, case, 600).state, torch.tensor([256, 255, 0])
    case.row_meta[cycle.ADJUST_SLOT, 0] = 1
    generator = torch.Generator().manual_seed(1)
    parts = (
        torch.randint(400, (2, 512), generator=generator, dtype=torch.int32),
        torch.randn(2, 512, generator=generator),
        torch.randint(100, 600, (2, 512), generator=generator, dtype=torch.int32),
    )
    case.row_meta[cycle.PROMPT_LEN, 0] = int(case.positions[0]) - 200
    state = AdjustState(state.counts, state.penalties, *parts)
    for columns in (None, torch.randperm(600, generator=generator)):
        same_adjusted(adjust_logits_of(8, 3, 600).cuda(), columns, sources, case, state)


def test_no_rows_of_logits_are_no_launch() -> None:
    case = row_case(5, 2, 2, 1, vocab_size=50)
    state = adjust_case(6, case, 50).state
    same_adjusted(torch.zeros(0, 50, device="cuda"), None, torch.zeros(0, dtype=torch.int64), case, state)


@pytest.mark.parametrize("with_drafts", [False, True])
@pytest.mark.parametrize(("num_rows", "places", "drafts", "branches"), SHAPES)
def test_outputs_are_counted_as_the_reference_counts_them(
    num_rows: int, places: int, drafts: int, branches: int, with_drafts: bool
) -> None:
    case = row_case(8, num_rows, places, drafts, vocab_size=3)
    expected = adjust_case(9, case, 403).state.counts
    expected[:, 1] = torch.randint(0x7FFD, 0x8000, expected[:, 1].shape).short()  # nearly as many as there can be
    device_state, next_state = next_state_of(case)
    cycle.accept_drafts(*case, 1, device_state, next_state)
    given = case.row_meta, case.starts, case.positions, case.following, next_state
    found = expected.cuda()
    cuda_adjust.count_outputs(*(part.cuda() for part in given), found, case.drafted.cuda() if with_drafts else None)
    adjust.count_outputs(*given, expected, case.drafted if with_drafts else None)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.skipif("PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="a graph needs Torch's memory pools")
def test_a_captured_cycle_gives_what_the_ops_give_one_by_one() -> None:
    case = row_case(5, 9, 10, 4, vocab_size=3000)
    state, sources, keys = adjust_case(6, case, 3000).state, sources_of(case), keys_of(3, 10)
    logits = adjust_logits_of(7, len(sources), 3000)
    parts = RowCase(*(part.cuda() for part in case))
    given = on_gpu(state), sources.cuda(), keys.cuda(), logits.cuda()
    device_state, next_state = (part.cuda() for part in next_state_of(case))
    numbers = torch.full((draw_plan.NUM_STREAMS, 5, 10), 77.0, dtype=torch.float64, device="cuda")
    adjusted = torch.full((len(sources), 3000), 77.0, device="cuda")
    before, following = given[0].counts.clone(), parts.following.clone()

    def run() -> None:
        of_rows = parts.starts, parts.positions, parts.drafted, parts.row_meta
        cuda_draw.draw_numbers(given[2], parts.starts, parts.positions, parts.row_meta, numbers)
        cuda_adjust.adjust_logits(given[3], None, given[1], *of_rows, given[0], adjusted)
        cuda_cycle.accept_drafts(*parts, 1, device_state, next_state)
        counted = parts.row_meta, parts.starts, parts.positions, parts.following, next_state, given[0].counts
        cuda_adjust.count_outputs(*counted, parts.drafted)

    run()
    expected = [part.clone() for part in (numbers, adjusted, device_state, next_state, given[0].counts)]
    given[0].counts.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert torch.equal(given[0].counts, before)
    for part in (numbers, adjusted, device_state[:, :10], next_state):
        part.fill_(78)
    parts.following.copy_(following)  # drafts that a budget kept are in it
    graph.replay()
    for one, other in zip((numbers, adjusted, device_state, next_state, given[0].counts), expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
