"""Results of rows, whose tokens are in columns."""

from __future__ import annotations

import pytest

from tide_core.batch import DraftCounts, RowResult, RowStep, TokenResult
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Audit, Request, SamplingParams

pytestmark = pytest.mark.unit

TOKENS = [
    TokenResult(5, 2, None, (), 0.5),
    TokenResult(6, 2, -0.5, ((6, -0.5), (7, -1.5)), 0.25, Audit.DISAGREED),
    TokenResult(7, 9, None, (), None),
]


def test_tokens_come_out_of_their_columns_as_they_went_in() -> None:
    result = RowResult.of(TOKENS, 3, 27)
    assert result.token_ids == (5, 6, 7)
    assert result.tokens == TOKENS


@pytest.mark.parametrize(
    ("start", "scores_from", "targets"),
    [(0, None, range(5)), (4, None, range(5, 9)), (0, 7, range(7, 5)), (4, 7, range(7, 9)), (8, 7, range(9, 10))],
)
def test_a_judged_answer_is_scored_from_its_first_token_on(start: int, scores_from: int | None, targets: range) -> None:
    prompt = tuple(range(10))
    request = Request("r", prompt, SamplingParams(max_tokens=1, prompt_logprobs=1), seed=0, scores_from=scores_from)
    step = RowStep(request, BlockTable(start), prompt[start : start + 4], (), samples=start == 8)
    assert list(step.prompt_targets) == list(targets)


def test_tokens_of_which_there_is_nothing_to_note_have_no_notes() -> None:
    plain = [TOKENS[0], TOKENS[2]]
    assert RowResult.of(plain, 2).notes == ()
    assert RowResult.of(plain, 2).tokens == plain


@pytest.mark.parametrize(("num", "passes"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (6, 3)])
def test_the_first_tokens_of_a_result_come_with_the_passes_that_gave_them(num: int, passes: int) -> None:
    """Two, one and three tokens by three passes of 62 layers each."""
    counts = tuple(DraftCounts(2, accepted, 0, 2) for accepted in (1, 0, 2))
    whole = RowResult((1, 2, 3, 4, 5, 6), (2, 9, 9, 2, 2, 9), (0.5,) * 6, 6, 3 * 62, counts)
    first = whole.first(num)
    assert (first.token_ids, first.exit_layers, len(first.scores)) == (
        whole.token_ids[:num],
        whole.exit_layers[:num],
        num,
    )
    assert (first.num_valid, first.layers_run, first.counts) == (num, passes * 62, counts[:passes])
