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


def run(depth: LaunchDepth, *, device: float, host: float, host_step: float, launches: int) -> None:
    """A device that needs so long for a cycle, and a host that needs so long for a launch and for each of its steps."""
    for _ in range(launches):
        steps = depth.steps
        busy, free = host + steps * host_step, steps * device
        depth.observe(steps, free, max(0.0, free - busy), max(free, busy))


def steps_over(depth: LaunchDepth, launches: int, **how: float) -> Counter[int]:
    """How many launches had so many steps."""
    found: Counter[int] = Counter()
    for _ in range(launches):
        found[depth.steps] += 1
        run(depth, **how, launches=1)
    return found


@pytest.mark.parametrize(
    ("host", "host_step", "steps"),
    [(0.5, 0.4, 1), (0.9, 0.3, 2), (1.4, 0.4, 3), (2.2, 0.4, 4), (9.0, 2.0, MAX_STEPS)],
)
def test_there_are_as_many_steps_as_it_takes_to_keep_the_device_busy(host: float, host_step: float, steps: int) -> None:
    depth, how = LaunchDepth(), {"device": 1.0, "host": host, "host_step": host_step}
    run(depth, **how, launches=10 * TRY_AFTER)
    found = steps_over(depth, 4 * TRY_AFTER_MOST, **how)
    assert found[steps] > 0.9 * found.total()
    assert max(found) == steps


@pytest.mark.parametrize("steps", [2, 4])
def test_a_host_that_keeps_up_again_goes_back_to_one(steps: int) -> None:
    """It need not be idle: two steps of a host that is busy for nine tenths of the time are one too many."""
    depth, how = LaunchDepth(steps), {"device": 1.0, "host": 0.2, "host_step": 0.7}
    run(depth, **how, launches=2 * MAX_STEPS * TRY_AFTER)
    assert steps_over(depth, 500, **how) == {1: 500}


@pytest.mark.parametrize(("took", "steps"), [(1.2, 1), (1.5, 2)])
def test_there_are_more_steps_only_where_the_device_loses_more_than_they_cost(took: float, steps: int) -> None:
    """A host that keeps up with two launches of three: what the third takes longer is what the device loses."""
    depth = LaunchDepth()
    for launch in range(50):
        is_late = launch % 3 == 0 and depth.steps == 1
        depth.observe(depth.steps, depth.steps * 1.0, 0.0 if is_late else 0.1, took if is_late else depth.steps * 1.0)
    assert depth.steps == steps


def test_what_the_device_loses_counts_although_the_host_waits_too() -> None:
    """A launch that is launched late, when the one before it has ended, may still not be done when it is read."""
    depth = LaunchDepth()
    for _ in range(6 * PATIENCE):
        depth.observe(1, 1.0, 0.3, 1.2)
    assert depth.steps == 1, "it may pass"
    depth.observe(1, 1.0, 0.3, 1.2)
    assert depth.steps == 2


def test_a_device_that_loses_much_is_not_left_waiting() -> None:
    depth, launches = LaunchDepth(), 0
    while depth.steps < MAX_STEPS:
        run(depth, device=1.0, host=9.0, host_step=0.5, launches=1)
        launches += 1
    assert launches <= 2 * (2 * PATIENCE + 1)


def test_a_host_that_is_disturbed_now_and_then_changes_nothing() -> None:
    depth = LaunchDepth()
    for launch in range(500):
        depth.observe(1, 1.0, *((0.0, 40.0) if launch % 25 == 0 else (0.4, 1.0)))
    assert depth.steps == 1


def test_launches_from_before_a_change_are_not_counted_for_it() -> None:
    depth = LaunchDepth(2)
    for _ in range(PATIENCE - 1):
        depth.observe(1, 0.5, 0.0, 1.0)
    for _ in range(PATIENCE - 1):
        depth.observe(3, 0.5, 0.0, 1.0)
    assert depth == LaunchDepth(2)


def test_a_host_that_waits_for_a_whole_step_launches_fewer_at_once() -> None:
    depth = LaunchDepth(3)
    run(depth, device=1.0, host=0.1, host_step=0.1, launches=2 * PATIENCE)
    assert depth.steps == 1


def test_what_the_device_loses_to_others_than_the_host_leads_to_changes_less_and_less_often() -> None:
    """It loses a fifth of a step between two launches, however long they are, and the host does next to nothing."""
    depth, changes = LaunchDepth(), list[int]()
    for launch in range(4 * TRY_AFTER_MOST):
        steps = depth.steps
        depth.observe(steps, steps * 1.0, steps * 1.0, steps + 0.2)
        changes += [launch] * (depth.steps != steps)
    assert len(changes) < 20
    assert len([launch for launch in changes if launch > 2 * TRY_AFTER_MOST]) < 6


def test_the_most_steps_there_may_be_are_left_again_although_the_device_loses_something() -> None:
    depth = LaunchDepth(MAX_STEPS)
    for _ in range(TRY_AFTER):
        depth.observe(MAX_STEPS, 1.0, 0.2, 1.2)
    assert depth.steps < MAX_STEPS


def test_a_depth_that_launches_do_not_reach_is_lowered_to_theirs() -> None:
    depth = LaunchDepth(4)
    for _ in range(PATIENCE):
        depth.observe(2, 1.0, 0.1, 1.0)
    assert depth.steps == 2


def test_whoever_begins_anew_soon_tries_whether_fewer_steps_will_do() -> None:
    depth = LaunchDepth()
    run(depth, device=1.0, host=2.2, host_step=0.4, launches=20 * TRY_AFTER_MOST)
    assert depth.steps == MAX_STEPS
    depth.restart()
    assert depth == LaunchDepth(MAX_STEPS)
    run(depth, device=1.0, host=0.2, host_step=0.7, launches=2 * MAX_STEPS * TRY_AFTER)
    assert depth.steps == 1


def test_each_number_of_rows_has_a_depth_of_its_own_and_keeps_it() -> None:
    depths = LaunchDepths()
    run(depths.of(32, draft=True), device=1.0, host=9.0, host_step=0.5, launches=TRY_AFTER)
    assert depths.of(31, draft=True).steps == MAX_STEPS, "about as many rows"
    for others in (
        depths.of(32, draft=False),
        depths.of(8, draft=True),
        depths.of(64, draft=True),
        depths.of(1, draft=True),
    ):
        assert others == LaunchDepth()
