"""Equal steps are counted together, with the same result as one by one."""

from __future__ import annotations

import pytest

from tests.factories import make_request
from tide_core.batch import DraftCounts
from tide_core.errors import ConfigError
from tide_core.outputs.exit_stats import ExitStats
from tide_core.outputs.step_stats import ALL_VERIFIED, PendingStats, StepRecord, StepStats, stats_of, totals
from tide_core.request import Audit, ExitPolicy

pytestmark = pytest.mark.unit

NUM_LAYERS = 30


def record(
    *exit_layers: int,
    layers_run: int = 60,
    drafted: int = 0,
    accepted: int = 0,
    non_finite: int = 0,
    audits: tuple[Audit, ...] = ALL_VERIFIED,
    informs_planner: bool = True,
) -> StepRecord:
    counts = (DraftCounts(drafted, accepted, non_finite, drafted),)
    return StepRecord(exit_layers, audits, layers_run, counts, informs_planner)


CYCLE = record(2, 30, layers_run=62, drafted=1, accepted=1)
PLAIN = record(30, layers_run=30)
CUT = record(2, layers_run=66, drafted=3, accepted=3, non_finite=1)
"""The text has ended with the first of three right drafts."""


def test_what_many_rows_did_is_in_the_stats_as_if_it_had_been_recorded_row_by_row() -> None:
    pending, stats = PendingStats(NUM_LAYERS), ExitStats(NUM_LAYERS)
    for each in (CYCLE, PLAIN, CYCLE, CUT, CYCLE):
        pending.add(each, {})
    drafts = pending.flush(stats)
    one_by_one = ExitStats(NUM_LAYERS)
    verified = Audit.VERIFIED
    for _ in range(3):
        one_by_one.record([(2, verified), (30, verified)], 62, 1, 1, 1)
    one_by_one.record([(30, verified)], 30, 1)
    one_by_one.record([(2, verified)], 66, 1, 3, 1, 1)
    assert stats.summary() == one_by_one.summary()
    assert drafts == [(CYCLE[3][0], 3), (CUT[3][0], 1)], "the planner observes right drafts after the end too"


def test_what_was_taken_is_not_taken_again() -> None:
    pending, stats = PendingStats(NUM_LAYERS), ExitStats(NUM_LAYERS)
    pending.add(CYCLE, {})
    pending.flush(stats)
    pending.flush(stats)
    assert stats.total_tokens == 2


def test_audits_are_counted_as_full_depth_gave_them() -> None:
    pending, stats = PendingStats(NUM_LAYERS), ExitStats(NUM_LAYERS)
    pending.add(record(2, 2, 30, audits=(Audit.AGREED, Audit.DISAGREED, Audit.VERIFIED)), {})
    pending.flush(stats)
    assert dict(stats.audits) == {Audit.AGREED: 1, Audit.DISAGREED: 1, Audit.VERIFIED: 1}


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS + 1])
def test_a_layer_that_cannot_be_is_refused_and_leaves_nothing_behind(layer: int) -> None:
    pending, stats, mine = PendingStats(NUM_LAYERS), ExitStats(NUM_LAYERS), dict[StepStats, int]()
    with pytest.raises(ConfigError, match="exit_layer"):
        pending.add(record(2, layer), mine)
    pending.flush(stats)
    assert (stats.total_tokens, mine) == (0, {})


def test_a_request_knows_what_it_did_itself() -> None:
    pending, mine, others = PendingStats(NUM_LAYERS), dict[StepStats, int](), dict[StepStats, int]()
    for each in (CYCLE, CYCLE, PLAIN, CUT):
        pending.add(each, mine)
    pending.add(PLAIN, others)
    assert totals(mine) == ({2: 3, 30: 3}, 62 + 62 + 30 + 66, 4, 5, 3, 0)
    assert totals(others) == ({30: 1}, 30, 1, 0, 0, 0)
    assert totals({}) == ({}, 0, 0, 0, 0, 0)


def test_of_several_passes_drafts_are_accepted_up_to_the_end_of_the_text() -> None:
    """Two tokens of the first, and one right draft of the two of the second."""
    counts = DraftCounts(1, 1, 0, 1), DraftCounts(2, 2, 0, 2)
    assert totals({stats_of(StepRecord((2, 30, 2), ALL_VERIFIED, 128, counts, True)): 1}) == (
        {2: 2, 30: 1},
        128,
        2,
        3,
        2,
        0,
    )


def test_passes_of_one_row_and_of_several_are_counted_together() -> None:
    """Where a step has several cycles hardly two rows did the same, but their passes did."""
    one, two = DraftCounts(1, 1, 0, 1), DraftCounts(1, 0, 0, 1)
    pending, stats = PendingStats(NUM_LAYERS), ExitStats(NUM_LAYERS)
    pending.add(StepRecord((2, 30, 30), ALL_VERIFIED, 124, (one, two), True), {})
    pending.add(StepRecord((30, 2, 30), ALL_VERIFIED, 124, (two, one), True), {})
    drafts = pending.flush(stats)
    assert sorted(drafts) == [(two, 2), (one, 2)]
    assert (dict(stats.tokens_per_layer), stats.deep_passes, stats.accepted) == ({2: 2, 30: 4}, 4, 2)


def test_drafts_that_do_not_inform_the_planner_are_not_reported() -> None:
    pending = PendingStats(NUM_LAYERS)
    pending.add(record(2, drafted=1, accepted=1, informs_planner=False), {})
    pending.add(PLAIN, {})
    assert pending.flush(ExitStats(NUM_LAYERS)) == []


def test_drafts_inform_the_planner_unless_the_request_has_a_threshold_a_bias_or_skips_layers() -> None:
    assert make_request().informs_planner
    assert not make_request(threshold=0.4).informs_planner
    assert not make_request(logit_bias={3: 1.0}).informs_planner
    assert not make_request(policy=ExitPolicy("fast")).informs_planner
