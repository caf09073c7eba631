"""Draws by the kernels against those in plain Torch on the same device.

Weights are whole numbers of Torch's own exponentials there, so tokens are the same ones. Should the two exponentials
ever differ in their last bit, a token would still be the same unless a number falls within 1e-6 of a border.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from tests.kernels.draw_cases import KINDS, cycle_of, logits_of, numbers_of, params_of, settings_of
from tide_core.kernels.cuda import draw as cuda_draw
from tide_core.kernels.reference import draw as draw_plan
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
sanitizer = pytest.mark.sanitizer
"""On one case of every path through the kernels: racecheck takes seconds for each."""


def watched(*values: Any) -> Any:
    return pytest.param(*values, marks=sanitizer)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(11, 1), (11, 7), watched(11, 300), watched(11, 4099), (44, 20001), (3, 49152), (150, 1000)]
UNEVEN = (4, 3, 2, 2, 1, 1, 0, 0, 0, 0, 0)
CYCLES = [watched((3,) * 11, 1000), (UNEVEN, 5001), watched((0,) * 11, 300), ((2,) * 44, 600)]


def drawn(logits: torch.Tensor, params: list[SamplingParams], vocab_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = settings_of(params).cuda(), numbers_of(2, len(logits)).cuda(), vocab_size or logits.shape[1]
    expected = draw_plan.draw(logits, *arguments)
    found = cuda_draw.draw(logits, *arguments)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1][:, draw_plan.BEST].tolist() == expected[1][:, draw_plan.BEST].tolist()
    assert found[1][:, draw_plan.CUT].tolist() == expected[1][:, draw_plan.CUT].tolist()
    torch.testing.assert_close(found[1][:, draw_plan.TOTAL], expected[1][:, draw_plan.TOTAL], rtol=1e-6, atol=0)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_rows_of_every_kind_draw_what_the_reference_draws(
    dtype: torch.dtype, num_rows: int, width: int, ties: bool
) -> None:
    drawn(logits_of(1, num_rows, width, ties=ties).to("cuda", dtype), params_of(num_rows))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_row_of_a_great_vocabulary_draws_what_the_reference_draws(kind: dict[str, Any]) -> None:
    for dtype in DTYPES:
        drawn(logits_of(3, 1, 128256).to("cuda", dtype), [SamplingParams(**kind)])


@sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_may_stand_for_a_part_of_a_larger_vocabulary(dtype: torch.dtype) -> None:
    drawn(logits_of(4, 22, 4469).to("cuda", dtype), params_of(22), vocab_size=49152)


@sanitizer
def test_rows_may_have_gaps_and_any_alignment_and_a_row_never_depends_on_its_mates() -> None:
    wide = logits_of(5, 60, 9001).to("cuda", torch.bfloat16)
    tokens, heads = drawn(wide[:, 1:9000], params_of(60))
    settings, numbers = settings_of(params_of(60)).cuda(), numbers_of(2, 60).cuda()
    for r in (0, 17, 59):
        one = wide[r : r + 1, 1:9000].clone(), settings[:, r : r + 1].contiguous(), numbers[r : r + 1]
        alone = cuda_draw.draw(*one, 8999)
        assert torch.equal(alone[0], tokens[r : r + 1])
        assert torch.equal(alone[1], heads[r : r + 1])


@sanitizer
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_says_so_and_names_a_token_that_exists(bad: float) -> None:
    logits = logits_of(6, 3, 5000).cuda()
    logits[1, 7 if bad != -math.inf else slice(None)] = bad
    tokens, heads = cuda_draw.draw(
        logits, settings_of([SamplingParams(temperature=0.8)] * 3).cuda(), numbers_of(7, 3).cuda(), 5000
    )
    assert heads[1, draw_plan.BEST].item() == pytest.approx(bad, nan_ok=True)
    assert tokens[1] == (7 if bad != -math.inf else 0)
    assert heads[[0, 2], draw_plan.TOTAL].gt(0).all()


def test_no_rows_are_no_launch() -> None:
    tokens, heads = cuda_draw.draw(
        torch.empty(0, 50, device="cuda"), settings_of([]).cuda(), torch.empty(0, dtype=torch.float64).cuda(), 50
    )
    assert tokens.shape == (0,)
    assert heads.shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "vocab_size"), CYCLES)
@pytest.mark.parametrize("ties", [False, True])
def test_drafts_are_judged_as_the_reference_judges_them(
    dtype: torch.dtype, counts: tuple[int, ...], vocab_size: int, ties: bool
) -> None:
    shortlist = torch.arange(1, vocab_size, 3)
    more: dict[str, Any] = {"dtype": dtype, "device": "cuda", "ties": ties}
    logits, cycle = cycle_of(8, params_of(len(counts)), counts, shortlist, vocab_size, **more)
    expected = draw_plan.verify_drawn(logits, cycle)
    found = cuda_draw.verify_drawn(logits, cycle)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
    by_kernel, same = cycle_of(8, params_of(len(counts)), counts, shortlist, vocab_size, draw=cuda_draw.draw, **more)
    assert torch.equal(same.draft_ids, cycle.draft_ids)
    assert cuda_draw.verify_drawn(by_kernel, same)[1].tolist() == expected[1].tolist(), "from the kernel's own heads"


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize(("counts", "vocab_size"), CYCLES)
def test_suffix_drafts_are_judged_as_the_reference_judges_them(
    passes: int, counts: tuple[int, ...], vocab_size: int
) -> None:
    shortlist = torch.arange(1, vocab_size, 3)
    logits, cycle = cycle_of(9, params_of(len(counts)), counts, shortlist, vocab_size, device="cuda")
    if passes == 0:
        cycle = cycle._replace(draft_logits=cycle.draft_logits[:0])
        cycle.draft_heads.zero_()
    else:  # every other row
        cycle.draft_heads[:, ::2] = 0.0
    expected = draw_plan.verify_drawn(logits, cycle)
    found = cuda_draw.verify_drawn(logits, cycle)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()


@pytest.mark.parametrize(("score", "least"), [(math.nan, -math.inf), (0.2, 0.5)])
def test_from_the_first_score_that_is_too_low_or_no_number_on_drafts_were_not_made(score: float, least: float) -> None:
    shortlist = torch.arange(0, 1000, 3)
    params = [SamplingParams(temperature=0.9, top_p=0.9)] * 6
    logits, cycle = cycle_of(21, params, [3] * 6, shortlist, 1000, least=least, device="cuda")
    cycle.scores.fill_(0.9)
    sound = cuda_draw.verify_drawn(logits, cycle)[1]
    cycle.scores[1, 2] = score
    found = cuda_draw.verify_drawn(logits, cycle)[1]
    assert found.tolist() == draw_plan.verify_drawn(logits, cycle)[1].tolist() != sound.tolist()


@pytest.mark.skipif("PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="a graph needs Torch's memory pools")
def test_nothing_waits_for_the_device_and_a_graph_gives_the_same() -> None:
    shortlist = torch.arange(0, 5000, 3)
    logits, cycle = cycle_of(9, params_of(22), [2] * 22, shortlist, 5000, device="cuda", dtype=torch.bfloat16)
    plain = cycle.draft_logits[0], cycle.settings, cycle.plain[0], 5000
    expected = cuda_draw.verify_drawn(logits, cycle)[1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = cuda_draw.draw(*plain)[0]
        found = cuda_draw.verify_drawn(logits, cycle)[1]
    graph.replay()
    assert torch.equal(found, expected)
    assert torch.equal(drafts, draw_plan.draw(*plain)[0])
