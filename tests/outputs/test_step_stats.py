"""Rows that did the same are counted together, and it comes to the same as one by one."""

from __future__ import annotations

import pytest

from tests.factories import make_request
from tide_core.batch import DraftCounts
from tide_core.errors import ConfigError
from tide_core.outputs.exit_stats import ExitStats
from tide_core.outputs.step_stats import ALL_VERIFIED, Did, Entry, Tally, did_of, sums
from tide_core.request import Audit, ExitPolicy

pytestmark = pytest.mark.unit

NUM_LAYERS = 30


def entry(
    *exit_layers: int,
    layers_run: int = 60,
    drafted: int = 0,
    accepted: int = 0,
    non_finite: int = 0,
    audits: tuple[Audit, ...] = ALL_VERIFIED,
    tells: bool = True,
) -> Entry:
    return exit_layers, audits, layers_run, (DraftCounts(drafted, accepted, non_finite, drafted),), tells


CYCLE = entry(2, 30, layers_run=62, drafted=1, accepted=1)
PLAIN = entry(30, layers_run=30)
CUT = entry(2, layers_run=66, drafted=3, accepted=3, non_finite=1)
"""The text has ended with the first of three right drafts."""


def test_what_many_rows_did_is_in_the_stats_as_if_it_had_been_recorded_row_by_row() -> None:
    tally, stats, heard = Tally(NUM_LAYERS), ExitStats(NUM_LAYERS), list[tuple[DraftCounts, int]]()
    for each in (CYCLE, PLAIN, CYCLE, CUT, CYCLE):
        tally.add(each, {})
    tally.take(stats, heard.extend)
    one_by_one = ExitStats(NUM_LAYERS)
    verified = Audit.VERIFIED
    for _ in range(3):
        one_by_one.record([(2, verified), (30, verified)], 62, 1, 1, 1)
    one_by_one.record([(30, verified)], 30, 1)
    one_by_one.record([(2, verified)], 66, 1, 3, 1, 1)
    assert stats.summary() == one_by_one.summary()
    assert heard == [(CYCLE[3][0], 3), (CUT[3][0], 1)], "the plan hears of right drafts behind the end too"


def test_what_was_taken_is_not_taken_again() -> None:
    tally, stats = Tally(NUM_LAYERS), ExitStats(NUM_LAYERS)
    tally.add(CYCLE, {})
    tally.take(stats, None)
    tally.take(stats, None)
    assert stats.total_tokens == 2


def test_audits_are_counted_as_full_depth_gave_them() -> None:
    tally, stats = Tally(NUM_LAYERS), ExitStats(NUM_LAYERS)
    tally.add(entry(2, 2, 30, audits=(Audit.AGREED, Audit.DISAGREED, Audit.VERIFIED)), {})
    tally.take(stats, None)
    assert dict(stats.audits) == {Audit.AGREED: 1, Audit.DISAGREED: 1, Audit.VERIFIED: 1}


@pytest.mark.parametrize("layer", [0, NUM_LAYERS + 1])
def test_a_layer_that_cannot_be_is_refused_and_leaves_nothing_behind(layer: int) -> None:
    tally, stats, mine = Tally(NUM_LAYERS), ExitStats(NUM_LAYERS), dict[Did, int]()
    with pytest.raises(ConfigError, match="exit_layer"):
        tally.add(entry(2, layer), mine)
    tally.take(stats, None)
    assert (stats.total_tokens, mine) == (0, {})


def test_a_request_knows_what_it_did_itself() -> None:
    tally, mine, others = Tally(NUM_LAYERS), dict[Did, int](), dict[Did, int]()
    for each in (CYCLE, CYCLE, PLAIN, CUT):
        tally.add(each, mine)
    tally.add(PLAIN, others)
    assert sums(mine) == ({2: 3, 30: 3}, 62 + 62 + 30 + 66, 4, 5, 3)
    assert sums(others) == ({30: 1}, 30, 1, 0, 0)
    assert sums({}) == ({}, 0, 0, 0, 0)


def test_of_several_passes_drafts_are_accepted_up_to_the_end_of_the_text() -> None:
    """Two tokens of the first, and one right draft of the two of the second."""
    counts = DraftCounts(1, 1, 0, 1), DraftCounts(2, 2, 0, 2)
    assert sums({did_of(((2, 30, 2), ALL_VERIFIED, 128, counts, True)): 1}) == ({2: 2, 30: 1}, 128, 2, 3, 2)


def test_passes_of_one_row_and_of_several_are_told_together() -> None:
    """Where a step has several cycles hardly two rows did the same, but their passes did."""
    one, two = DraftCounts(1, 1, 0, 1), DraftCounts(1, 0, 0, 1)
    tally, stats, heard = Tally(NUM_LAYERS), ExitStats(NUM_LAYERS), list[tuple[DraftCounts, int]]()
    tally.add(((2, 30, 30), ALL_VERIFIED, 124, (one, two), True), {})
    tally.add(((30, 2, 30), ALL_VERIFIED, 124, (two, one), True), {})
    tally.take(stats, heard.extend)
    assert sorted(heard) == [(two, 2), (one, 2)]
    assert (dict(stats.tokens_per_layer), stats.deep_passes, stats.accepted) == ({2: 2, 30: 4}, 4, 2)


def test_drafts_that_tell_nothing_about_those_of_others_are_not_told() -> None:
    heard: list[tuple[DraftCounts, int]] = []
    tally = Tally(NUM_LAYERS)
    tally.add(entry(2, drafted=1, accepted=1, tells=False), {})
    tally.add(PLAIN, {})
    tally.take(ExitStats(NUM_LAYERS), heard.extend)
    assert heard == []


def test_drafts_tell_about_others_unless_a_request_has_wishes_or_is_never_compared() -> None:
    assert make_request().drafts_as_others
    assert not make_request(threshold=0.4).drafts_as_others
    assert not make_request(logit_bias={3: 1.0}).drafts_as_others
    assert not make_request(policy=ExitPolicy("fast")).drafts_as_others
