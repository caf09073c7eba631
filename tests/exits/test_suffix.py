"""Suffix drafts: matches, their chances, and what is kept of earlier outputs."""

from __future__ import annotations

import pytest

from tests.factories import make_request
from tide_core.exits import suffix
from tide_core.exits.cost import RowAcceptance
from tide_core.exits.suffix import MAX_MATCH, MAX_SUFFIX_DRAFTS, SharedOutputs, SuffixDrafts, TokenIndex
from tide_core.kv.block_manager import BlockTable
from tide_core.request import Request, SamplingParams
from tide_core.row import Row


def index_of(tokens: list[int]) -> TokenIndex:
    index = TokenIndex(tokens)
    index.catch_up()
    return index


def row_of(prompt: list[int], *outputs: int, salt: str = "", end_ids: tuple[int, ...] = ()) -> Row:
    params = SamplingParams(max_tokens=1000, stop_ids=end_ids)
    request = Request("r", tuple(prompt), params, 0, cache_salt=salt)
    return Row(request, None, BlockTable(), RowAcceptance(), list(outputs))


def test_two_tokens_are_no_match() -> None:
    index = index_of([1, 2, 9, 9, 1, 2])
    assert index.longest(index.tokens) is None


def test_three_tokens_match_what_followed_them() -> None:
    index = index_of([1, 2, 3, 50, 51, 1, 2, 3])
    match = index.longest(index.tokens)
    assert match is not None
    assert (match.place, match.length) == (3, 3)
    assert index.following(match.place, 2) == [50, 51]


def test_the_longest_match_wins_over_a_later_one() -> None:
    index = index_of([7, 8, 1, 2, 3, 50, 0, 1, 2, 3, 60, 7, 8, 1, 2, 3])
    match = index.longest(index.tokens)
    assert match is not None
    assert index.following(match.place, 1) == [50]
    assert match.length == 5


def test_the_latest_of_equal_matches_wins() -> None:
    index = index_of([5, 1, 2, 3, 50, 6, 1, 2, 3, 60, 7, 1, 2, 3])
    match = index.longest(index.tokens)
    assert match is not None
    assert index.following(match.place, 1) == [60]


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    index = index_of([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    match = index.longest(index.tokens)
    assert match is not None
    assert index.following(match.place, 6) == [4, 1, 2, 3, 4, 1]


def test_a_long_text_is_indexed_in_steps_and_only_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_INDEXED", 100)
    index = TokenIndex(list(range(1000)))
    assert index.num_pending == 97
    index.catch_up(50)
    assert index.num_pending == 47
    index.catch_up()
    assert index.longest([10, 11, 12]) is None
    match = index.longest([950, 951, 952])
    assert match is not None
    assert match.place == 953


def test_a_row_is_given_what_followed_in_its_prompt() -> None:
    prompt = list(range(10, 40))
    drafts = SuffixDrafts()
    row = row_of([*prompt, 5], 20, 21, 22)
    found = drafts.propose(row)
    assert found is not None
    assert found.token_ids == list(range(23, 23 + MAX_SUFFIX_DRAFTS))


def test_a_match_that_went_on_is_kept_and_grows_surer() -> None:
    drafts = SuffixDrafts()
    row = row_of([*range(10, 60), 5], 20, 21, 22)
    first = drafts.propose(row)
    row.output_ids += [23, 24, 25, 26, 27, 28]
    second = drafts.propose(row)
    assert first is not None
    assert second is not None
    assert second.token_ids[0] == 29
    assert second.chance > first.chance


def test_a_match_that_was_wrong_makes_the_row_less_sure() -> None:
    drafts = SuffixDrafts()
    row = row_of([10, 11, 12, 13, 5, 10, 11, 12, 13, 6], 10, 11, 12)
    first = drafts.propose(row)
    row.output_ids += [99, 10, 11, 12]
    second = drafts.propose(row)
    assert first is not None
    assert second is not None
    assert second.chance < first.chance


def test_every_match_is_counted_by_its_length_drafted_or_not() -> None:
    drafts = SuffixDrafts()
    row = row_of([*range(10, 60), 5], 20, 21, 22)
    before = [(chance.hits, chance.tries) for chance in drafts.chances]
    drafts.propose(row)
    row.output_ids += [23, 24, 7]
    drafts.propose(row)
    after = [(chance.hits, chance.tries) for chance in drafts.chances]
    assert after[0] == (before[0][0] + 2, before[0][1] + 3)
    assert after[1:] == before[1:]


def test_drafts_end_with_the_end_of_the_text() -> None:
    found = SuffixDrafts().propose(row_of([1, 2, 3, 0, 8, 9], 1, 2, 3, end_ids=(0,)))
    assert found is not None
    assert found.token_ids == [0]


def test_earlier_outputs_serve_requests_of_the_same_salt_alone() -> None:
    drafts = SuffixDrafts()
    drafts.remove(row_of([1], *range(100, 140), salt="a"))
    mine, other = row_of([9], 110, 111, 112, salt="a"), row_of([9], 110, 111, 112, salt="b")
    found = drafts.propose(mine)
    assert found is not None
    assert found.token_ids[:3] == [113, 114, 115]
    assert drafts.propose(other) is None


def test_without_sharing_no_row_sees_another() -> None:
    drafts = SuffixDrafts(shares=False)
    drafts.remove(row_of([1], *range(100, 140)))
    assert drafts.propose(row_of([9], 110, 111, 112)) is None


def test_what_is_kept_of_earlier_outputs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_SHARED", 400)
    monkeypatch.setattr(suffix, "MAX_SHARED_PER_SALT", 100)
    shared = SharedOutputs()
    for salt in range(20):
        for start in range(0, 600, 30):
            shared.add(str(salt), range(start, start + 30))
    assert shared.num_tokens == sum(len(part.tokens) for salt in range(20) for part in shared.of(str(salt)))
    assert shared.num_tokens <= 400
    assert shared.of("0") == []
    [newest, *_] = shared.of("19")
    assert newest.tokens[-1] == 599
    assert all(len(part.tokens) <= 50 for part in shared.of("19"))


def test_an_output_longer_than_all_that_is_kept_leaves_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_SHARED_PER_SALT", 100)
    shared = SharedOutputs()
    shared.add("", range(1000))
    assert shared.of("")[0].tokens == list(range(950, 1000))


def test_a_match_says_no_more_than_its_longest_length() -> None:
    index = index_of([*range(1, 40), 500, *range(1, 40)])
    match = index.longest(index.tokens)
    assert match is not None
    assert match.length == MAX_MATCH


def test_a_request_with_a_threshold_or_a_least_layer_has_none() -> None:
    assert make_request().may_copy
    assert not make_request(threshold=0.5).may_copy
    assert not make_request(min_layers=1).may_copy
