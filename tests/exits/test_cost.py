"""Cost table and draft planner: how many drafts pay, by numbers alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tide_core.batch import DraftCounts
from tide_core.exits.cost import (
    LEAST_GAIN,
    PRIOR_REACH,
    PROBE_EVERY,
    SUFFIX_SIZES,
    Acceptance,
    Chance,
    CostPoint,
    CostTable,
    DraftPlanner,
    Plan,
    SuffixPlan,
)
from tide_core.request import ExitPolicy

pytestmark = pytest.mark.unit

MAX_DRAFTS = 6
VERIFIED = ExitPolicy("verified")


def point(rows: int, full: float = 10.0, first: float = 10.0, draft: float = 1.0) -> CostPoint:
    """A cycle costs `first` and `draft` more for every draft."""
    return CostPoint(rows, full, tuple((k, first + draft * k) for k in (0, 1, 3, MAX_DRAFTS)))


def planner(acceptance: float, *points: CostPoint, max_drafts: int = MAX_DRAFTS) -> DraftPlanner:
    prior = Acceptance.prior([acceptance] * max_drafts, max_drafts)
    return DraftPlanner(max_drafts, prior, CostTable(points or (point(1), point(8), point(32))))


def chance(of_each: list[Chance], draft: int) -> float:
    """That a row gets to its `draft`-th draft, each given the one before."""
    return math.prod(one.value for one in of_each[:draft])


def test_a_table_is_exact_at_its_points_and_straight_between_them() -> None:
    table = CostTable((point(1, full=10.0), point(3, full=20.0), point(8, full=70.0, draft=3.0)))
    assert [table.full(rows) for rows in (1, 2, 3, 4, 8)] == [10.0, 15.0, 20.0, 30.0, 70.0]
    assert [table.cycle(1, drafts) for drafts in range(7)] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]
    assert table.cycle(8, 2) == 16.0
    assert table.cycle(4, 2) == pytest.approx(12.0 + (16.0 - 12.0) / 5)
    assert table.max_rows == 8


def test_a_table_of_one_point_says_the_same_for_every_number_of_rows() -> None:
    table = CostTable((point(4),))
    assert table.full(1) == table.full(4) == 10.0


def test_a_table_without_points_knows_no_rows() -> None:
    assert CostTable(()).max_rows == 0


def test_prior_acceptance_falls_with_distance_and_never_keeps_what_was_not_reached() -> None:
    prior = Acceptance.prior([0.9, 0.8], 4)
    rights = [0.9, 0.8, 0.8, 0.8]
    expected = [math.prod(PRIOR_REACH * right for right in rights[:k]) for k in (1, 2, 3, 4)]
    assert [chance(prior.kept, k) for k in (1, 2, 3, 4)] == pytest.approx(expected)
    assert all(chance(prior.kept, k) <= chance(prior.reached, k) <= chance(prior.reached, k - 1) for k in (1, 2, 3, 4))
    assert chance(Acceptance.prior([], 2).kept, 1) == 0.0


def test_the_higher_the_acceptance_the_more_drafts_are_planned() -> None:
    plans = [planner(share).plan(1, 1) for share in (0.05, 0.3, 0.6, 0.8, 0.95)]
    drafts = [plan.drafts for plan in plans]
    assert drafts == sorted(drafts)
    assert (drafts[0], drafts[-1]) == (0, MAX_DRAFTS)
    assert len(set(drafts)) >= 3
    gains = [plan.gain for plan in plans]
    assert gains == sorted(gains)


def test_the_plan_is_the_best_of_all_numbers_of_drafts() -> None:
    for share, cost in itertools.product((0.5, 0.7, 0.9), (0.5, 2.0, 4.0)):
        best = planner(share, point(1, draft=cost)).plan(1, 1)
        others = [planner(share, point(1, draft=cost), max_drafts=k).plan(1, 1) for k in range(1, MAX_DRAFTS + 1)]
        assert best.gain == pytest.approx(max(plan.gain for plan in others))


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert planner(0.8, point(1, draft=20.0)).plan(1, 1) == Plan(0, 1.0)
    assert planner(0.0).plan(1, 1) == Plan(0, 1.0)
    assert planner(0.9, point(1, first=100.0)).plan(1, 1) == Plan(0, 1.0), "a cycle dearer than what it saves"


def test_a_gain_too_small_to_be_sure_of_is_not_taken() -> None:
    barely = planner(0.11, point(1, draft=1.0), max_drafts=1)
    assert 1.0 < (1 + 0.11) / 1.1 < LEAST_GAIN
    assert barely.plan(1, 1).drafts == 0


def test_the_gain_is_tokens_per_second_over_those_of_full_depth() -> None:
    [gain] = [planner(0.8, point(1, full=10.0, first=11.0, draft=2.0), max_drafts=1).plan(1, 1).gain]
    assert gain == pytest.approx((1 + 0.8 * PRIOR_REACH) / (11.0 + 2.0) * 10.0)


def test_where_the_host_is_the_slower_one_drafts_pay_by_what_they_save_the_host() -> None:
    """A draft takes the device so long that it would not pay; but the host is busy for longer in any case."""
    slow = planner(0.8, point(8, draft=9.0), max_drafts=1)
    assert slow.plan(8, 8).drafts == 0
    slow.observe_host(8, 8, 16 * 2.0)
    tokens = 8 * (1 + 0.8 * PRIOR_REACH)
    plan = slow.plan(8, 8)
    assert plan.drafts == 1
    assert plan.gain == pytest.approx(tokens / (2.0 * (8 + tokens)) / (8 / (2.0 * 16)))


def test_a_host_that_is_quick_enough_changes_no_plan() -> None:
    alone, beside = planner(0.8), planner(0.8)
    beside.observe_host(8, 8, 16 * 0.1)
    assert beside.plan(8, 8) == alone.plan(8, 8)


def test_what_the_host_needs_is_smoothed() -> None:
    one = planner(0.8)
    one.observe_host(8, 8, 1.6)
    assert one.host_s == {8: pytest.approx(0.1)}
    one.observe_host(8, 24, 32.0)
    assert 0.1 < one.host_s[8] < 0.15
    for _ in range(500):
        one.observe_host(8, 24, 32.0)
    assert one.host_s[8] == pytest.approx(1.0, rel=0.01)


def test_a_step_that_took_the_host_long_once_is_soon_forgotten() -> None:
    """It has made a graph, maybe."""
    first, later = planner(0.8), planner(0.8)
    first.observe_host(8, 8, 160.0)
    later.observe_host(8, 8, 1.6)
    later.observe_host(8, 8, 160.0)
    assert later.host_s[8] < 0.11
    for _ in range(60):
        first.observe_host(8, 8, 1.6)
    assert first.host_s[8] < 0.2


def test_what_the_host_needs_is_known_by_the_number_of_rows_or_the_next_one() -> None:
    """A row alone costs the host more than one of many: what is the same in every step is all its own."""
    alone, few = planner(0.8, point(8, draft=9.0)), planner(0.8, point(8, draft=9.0))
    alone.observe_host(1, 1, 2 * 2.0)
    few.observe_host(1, 1, 2 * 2.0)
    few.observe_host(7, 7, 14 * 0.1)
    assert alone.plan(8, 8).drafts > 0, "nothing else is known"
    assert few.plan(8, 8).drafts == 0


def test_rows_that_may_not_exit_share_the_step_and_lower_the_gain() -> None:
    alone, mixed = planner(0.8).plan(8, 8), planner(0.8).plan(2, 8)
    assert alone.gain > mixed.gain >= 1.0


def test_nothing_is_drafted_beyond_the_rows_of_the_table() -> None:
    wide = planner(0.9, point(1), point(8))
    assert wide.plan(8, 8).drafts > 0
    assert wide.plan(9, 9) == Plan(0, 1.0)
    assert DraftPlanner(4, Acceptance.prior([0.9], 4), CostTable(())).plan(1, 1) == Plan(0, 1.0)


def test_a_plan_follows_the_table_and_the_limit_in_force() -> None:
    changed = planner(0.9, point(1, draft=0.5))
    assert changed.plan(1, 1).drafts == MAX_DRAFTS
    changed.max_drafts = 2
    assert changed.plan(1, 1).drafts == 2
    changed.table = CostTable((point(1, draft=20.0),))
    assert changed.plan(1, 1).drafts == 0


def test_the_same_question_has_the_same_answer_each_time() -> None:
    asked = planner(0.7)
    kinds = [(drafting, rows) for rows in (1, 3, 8, 20) for drafting in range(1, rows + 1)]
    first = [asked.plan(*kind) for kind in kinds]
    assert [asked.plan(*kind) for kind in kinds] == first == [planner(0.7).plan(*kind) for kind in kinds]
    assert len(set(first)) > 3


def test_a_fixed_plan_is_always_the_same_whatever_the_load_and_the_acceptance() -> None:
    fixed = DraftPlanner(3, Acceptance.prior([0.0], 3))
    assert [fixed(rows, rows) for rows in (1, 50, 5000)] == [3, 3, 3]
    for _ in range(100):
        observe(fixed, allowed=3, drafted=3, accepted=0)
    assert fixed(1, 1) == 3
    assert DraftPlanner(0, Acceptance.prior([0.9], 1))(1, 1) == 0


def observe(planner: DraftPlanner, *, allowed: int, drafted: int, accepted: int, times: int = 1) -> None:
    planner.observe([(DraftCounts(drafted, accepted, allowed=allowed), times)])


def test_drafts_that_are_refused_make_the_planner_give_up_and_accepted_ones_bring_it_back() -> None:
    adaptive = planner(0.9)
    assert adaptive.plan(1, 1).drafts == MAX_DRAFTS
    for _ in range(2000):
        observe(adaptive, allowed=MAX_DRAFTS, drafted=MAX_DRAFTS, accepted=0)
    assert adaptive.plan(1, 1).drafts == 0
    for _ in range(6000):
        observe(adaptive, allowed=MAX_DRAFTS, drafted=MAX_DRAFTS, accepted=MAX_DRAFTS)
    assert adaptive.plan(1, 1).drafts == MAX_DRAFTS


def test_a_row_that_stops_drafting_early_costs_little_so_more_drafts_are_allowed() -> None:
    """With one row, the j-th pass is paid for only when the row gets that far."""
    eager, careful = (planner(0.7, point(1, draft=2.5)) for _ in range(2))
    for _ in range(3000):
        observe(eager, allowed=MAX_DRAFTS, drafted=MAX_DRAFTS, accepted=2)
        observe(careful, allowed=MAX_DRAFTS, drafted=2, accepted=2)
    assert careful.plan(1, 1).gain >= eager.plan(1, 1).gain


def test_a_cycle_says_nothing_about_drafts_it_was_not_allowed() -> None:
    short = planner(0.9)
    before = [chance.value for chance in short.acceptance.kept]
    for _ in range(500):
        observe(short, allowed=2, drafted=2, accepted=0)
    after = [chance.value for chance in short.acceptance.kept]
    assert after[0] < 0.1
    assert after[1:] == before[1:], "nothing was kept that a second draft could follow"


def test_a_planner_that_gave_up_tries_again_where_calibration_says_it_pays() -> None:
    beaten = planner(0.9)
    for _ in range(500):
        observe(beaten, allowed=2, drafted=1, accepted=0)
    plans = [beaten(1, 1) for _ in range(4 * PROBE_EVERY)]
    assert plans.count(1) == 4
    assert plans.count(0) == len(plans) - 4
    for _ in range(500):
        observe(beaten, allowed=1, drafted=1, accepted=1)
    assert beaten(1, 1) > 0
    hopeless = planner(0.01)
    assert {hopeless(1, 1) for _ in range(2 * PROBE_EVERY)} == {0}


def test_what_the_host_does_for_a_row_is_shared_by_the_cycles_that_it_reads_together() -> None:
    slow = planner(0.8, point(8, draft=9.0), max_drafts=1)
    slow.observe_host(8, 32, 2.0 * (8 + 32), 4)
    tokens = 8 * (1 + 0.8 * PRIOR_REACH)
    plan = slow.plan(8, 8)
    assert plan.drafts == 1
    assert plan.gain == pytest.approx(tokens / (2.0 * (2 + tokens)) / (8 / (2.0 * (2 + 8))))


def test_a_step_without_drafts_is_not_an_observation() -> None:
    idle: Any = planner(0.9)
    before = idle.acceptance.kept[0].value
    observe(idle, allowed=0, drafted=0, accepted=0)
    assert idle.acceptance.kept[0].value == before


def test_rows_that_did_not_do_the_same_count_by_how_many_they_are_in_whatever_order() -> None:
    """The first would have faded most, if each counted for itself."""
    counted = planner(0.5)
    right, wrong = DraftCounts(1, 1, allowed=1), DraftCounts(1, 0, allowed=1)
    for _ in range(200):
        counted.observe([(right, 96), (wrong, 32)])
    assert counted.acceptance.kept[0].value == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize("before", [0, 460, 700])
def test_rows_that_did_the_same_teach_together_what_they_teach_one_by_one(before: int) -> None:
    """Also where the memory becomes full among them."""
    together, alone = planner(0.9), planner(0.9)
    for adaptive in (together, alone):
        for _ in range(before):
            observe(adaptive, allowed=2, drafted=2, accepted=1)
    observe(together, allowed=MAX_DRAFTS, drafted=3, accepted=2, times=50)
    for _ in range(50):
        observe(alone, allowed=MAX_DRAFTS, drafted=3, accepted=2)
    for mine, theirs in (
        (together.acceptance.kept, alone.acceptance.kept),
        (together.acceptance.reached, alone.acceptance.reached),
    ):
        assert [chance.hits for chance in mine] == pytest.approx([chance.hits for chance in theirs])
        assert [chance.tries for chance in mine] == pytest.approx([chance.tries for chance in theirs])


def test_plans_are_counted_and_the_last_one_is_kept() -> None:
    counted = planner(0.9, point(1, full=10.0, first=10.0, draft=1.0), point(8, full=10.0, first=10.0, draft=99.0))
    assert counted(1, 1) > 0
    counted(8, 8)
    assert (counted.num_plans, counted.num_full) == (2, 1)
    assert counted.last == Plan(0, 1.0)


def with_suffix(rows: int, full: float, each: float, draft: float = 1.0) -> CostPoint:
    """A suffix draft costs `each`, that of an exit `draft`."""
    exits = tuple((k, full + draft * k) for k in (0, 1, 3, MAX_DRAFTS))
    return CostPoint(rows, full, exits, tuple((k, full + each * k) for k in SUFFIX_SIZES))


def test_suffix_drafts_are_taken_where_they_pay_more_than_those_of_exits() -> None:
    plans = planner(0.6, with_suffix(1, 10.0, 0.1))
    plans(1, 1)
    assert plans.plan_suffix(1, 1, [0.95]) == SuffixPlan(0, 15)
    assert plans.plan_suffix(1, 1, [0.05]) == SuffixPlan(plans.last.drafts, 0), "hardly ever right"
    dear = planner(0.6, with_suffix(1, 10.0, 30.0))
    dear(1, 1)
    assert dear.plan_suffix(1, 1, [0.3]).suffix == 0


def test_more_suffix_drafts_are_taken_the_surer_they_are() -> None:
    plans = planner(0.0, with_suffix(1, 10.0, 1.0))
    plans(1, 1)
    found = [plans.plan_suffix(1, 1, [chance]).suffix for chance in (0.2, 0.5, 0.8, 0.99)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 15)


def test_beside_exits_rows_take_as_many_as_exits_draft() -> None:
    plans = planner(0.9, *(with_suffix(rows, 10.0, 20.0, draft=0.2) for rows in (1, 8)))
    drafts = plans(8, 8)
    assert drafts > 0
    assert plans.plan_suffix(8, 8, [0.99]) == SuffixPlan(drafts, drafts)


def test_the_host_waits_for_suffix_drafts_so_its_time_counts() -> None:
    plans = planner(0.5, with_suffix(1, 10.0, 0.1))
    plans(1, 1)
    assert plans.plan_suffix(1, 1, [0.6]).suffix
    slow = planner(0.5, with_suffix(1, 10.0, 0.1))
    slow.observe_host(1, 1, 40.0)
    slow(1, 1)
    assert slow.plan_suffix(1, 1, [0.6]).suffix == 0


def test_rows_without_any_cost_nothing_more_unless_graphs_are_padded() -> None:
    points = [with_suffix(rows, 10.0, 1.0) for rows in (1, 8)]
    ragged, padded = planner(0.0, *points), planner(0.0, *points)
    padded.pads = True
    for plans in (ragged, padded):
        plans(8, 8)
    assert ragged.plan_suffix(8, 8, [0.9]).suffix > 0
    assert padded.plan_suffix(8, 8, [0.9]).suffix == 0


def test_a_table_without_them_allows_no_row() -> None:
    assert planner(0.5).max_suffix_rows == 0
    assert planner(0.5, with_suffix(1, 10.0, 1.0), with_suffix(4, 10.0, 1.0), point(8)).max_suffix_rows == 4
