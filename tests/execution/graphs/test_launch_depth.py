"""Cycles are launched several at a time as long as the device would wait for the host, and no longer."""

from __future__ import annotations

from collections import Counter

import pytest

from tide_core.execution.graphs.launch_depth import (
    MAX_STEPS,
    PATIENCE,
    TRY_AFTER,
    TRY_AFTER_MOST,
    LaunchDepth,
    LaunchDepths,
)

pytestmark = pytest.mark.unit


def run(pace: LaunchDepth, *, device: float, host: float, host_leg: float, flights: int) -> None:
    """Flights of a device that needs so long for a cycle, and a host that needs so long for a flight and for a leg."""
    for _ in range(flights):
        legs = pace.legs
        busy, free = host + legs * host_leg, legs * device
        pace.note(legs, free, max(0.0, free - busy), max(free, busy))


def legs_over(pace: LaunchDepth, flights: int, **how: float) -> Counter[int]:
    """How many flights had so many legs."""
    found: Counter[int] = Counter()
    for _ in range(flights):
        found[pace.legs] += 1
        run(pace, **how, flights=1)
    return found


@pytest.mark.parametrize(
    ("host", "host_leg", "legs"),
    [(0.5, 0.4, 1), (0.9, 0.3, 2), (1.4, 0.4, 3), (2.2, 0.4, 4), (9.0, 2.0, MAX_STEPS)],
)
def test_there_are_as_many_legs_as_it_takes_to_keep_the_device_busy(host: float, host_leg: float, legs: int) -> None:
    pace, how = LaunchDepth(), {"device": 1.0, "host": host, "host_leg": host_leg}
    run(pace, **how, flights=10 * TRY_AFTER)
    found = legs_over(pace, 4 * TRY_AFTER_MOST, **how)
    assert found[legs] > 0.9 * found.total()
    assert max(found) == legs


@pytest.mark.parametrize("legs", [2, 4])
def test_a_host_that_keeps_up_again_goes_back_to_one(legs: int) -> None:
    """It need not be idle: two legs of a host that is busy for nine tenths of the time are one too many."""
    pace, how = LaunchDepth(legs), {"device": 1.0, "host": 0.2, "host_leg": 0.7}
    run(pace, **how, flights=2 * MAX_STEPS * TRY_AFTER)
    assert legs_over(pace, 500, **how) == {1: 500}


@pytest.mark.parametrize(("took", "legs"), [(1.2, 1), (1.5, 2)])
def test_there_are_more_legs_only_where_the_device_loses_more_than_they_cost(took: float, legs: int) -> None:
    """A host that keeps up with two flights of three: what the third takes longer is what the device loses."""
    pace = LaunchDepth()
    for flight in range(50):
        is_late = flight % 3 == 0 and pace.legs == 1
        pace.note(pace.legs, pace.legs * 1.0, 0.0 if is_late else 0.1, took if is_late else pace.legs * 1.0)
    assert pace.legs == legs


def test_what_the_device_loses_counts_although_the_host_waits_too() -> None:
    """A flight that is launched late, when the one before it has ended, may still not be done when it is read."""
    pace = LaunchDepth()
    for _ in range(6 * PATIENCE):
        pace.note(1, 1.0, 0.3, 1.2)
    assert pace.legs == 1, "it may pass"
    pace.note(1, 1.0, 0.3, 1.2)
    assert pace.legs == 2


def test_a_device_that_loses_much_is_not_left_waiting() -> None:
    pace, flights = LaunchDepth(), 0
    while pace.legs < MAX_STEPS:
        run(pace, device=1.0, host=9.0, host_leg=0.5, flights=1)
        flights += 1
    assert flights <= 2 * (2 * PATIENCE + 1)


def test_a_host_that_is_disturbed_now_and_then_changes_nothing() -> None:
    pace = LaunchDepth()
    for flight in range(500):
        pace.note(1, 1.0, *((0.0, 40.0) if flight % 25 == 0 else (0.4, 1.0)))
    assert pace.legs == 1


def test_what_was_begun_before_a_change_says_nothing_about_it() -> None:
    pace = LaunchDepth(2)
    for _ in range(PATIENCE - 1):
        pace.note(1, 0.5, 0.0, 1.0)
    for _ in range(PATIENCE - 1):
        pace.note(3, 0.5, 0.0, 1.0)
    assert pace == LaunchDepth(2)


def test_a_host_that_waits_for_a_whole_leg_needs_it_no_longer_and_nothing_is_tried() -> None:
    pace = LaunchDepth(3)
    run(pace, device=1.0, host=0.1, host_leg=0.1, flights=2 * PATIENCE)
    assert pace.legs == 1


def test_what_the_device_loses_to_others_than_the_host_leads_to_changes_less_and_less_often() -> None:
    """It loses a fifth of a leg between two flights, however long they are, and the host does next to nothing."""
    pace, changes = LaunchDepth(), list[int]()
    for flight in range(4 * TRY_AFTER_MOST):
        legs = pace.legs
        pace.note(legs, legs * 1.0, legs * 1.0, legs + 0.2)
        changes += [flight] * (pace.legs != legs)
    assert len(changes) < 20
    assert len([flight for flight in changes if flight > 2 * TRY_AFTER_MOST]) < 6


def test_the_most_legs_there_may_be_are_left_again_although_the_device_loses_something() -> None:
    pace = LaunchDepth(MAX_STEPS)
    for _ in range(TRY_AFTER):
        pace.note(MAX_STEPS, 1.0, 0.2, 1.2)
    assert pace.legs < MAX_STEPS


def test_flights_that_have_no_room_for_their_legs_are_not_planned_for_any_more() -> None:
    pace = LaunchDepth(4)
    for _ in range(PATIENCE):
        pace.note(2, 1.0, 0.1, 1.0)
    assert pace.legs == 2


def test_whoever_begins_anew_soon_tries_whether_fewer_legs_will_do() -> None:
    pace = LaunchDepth()
    run(pace, device=1.0, host=2.2, host_leg=0.4, flights=20 * TRY_AFTER_MOST)
    assert pace.legs == MAX_STEPS
    pace.begin()
    assert pace == LaunchDepth(MAX_STEPS)
    run(pace, device=1.0, host=0.2, host_leg=0.7, flights=2 * MAX_STEPS * TRY_AFTER)
    assert pace.legs == 1


def test_what_was_found_for_some_rows_says_nothing_about_others_and_is_remembered() -> None:
    paces = LaunchDepths()
    run(paces.of(32, draft=True), device=1.0, host=9.0, host_leg=0.5, flights=TRY_AFTER)
    assert paces.of(31, draft=True).legs == MAX_STEPS, "about as many rows"
    for others in (
        paces.of(32, draft=False),
        paces.of(8, draft=True),
        paces.of(64, draft=True),
        paces.of(1, draft=True),
    ):
        assert others == LaunchDepth()
