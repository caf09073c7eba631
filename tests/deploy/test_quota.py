"""Limits of a key: what is let in, what must wait and how long."""

from __future__ import annotations

import pytest

from deploy.failures import QuotaError
from deploy.keys import Caller, KeyLimits
from deploy.quota import Quotas


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def limited(name: str = "team", **limits: int) -> Caller:
    return Caller(name, limits=KeyLimits(**limits))


def wait_of(quotas: Quotas, caller: Caller) -> int:
    with pytest.raises(QuotaError) as refused:
        quotas.enter(caller)
    return refused.value.retry_after_s


def test_a_caller_without_limits_has_none(quotas: Quotas) -> None:
    for _ in range(10_000):
        quotas.enter(Caller())
        quotas.spend(Caller(), 10**9)


def test_as_many_requests_a_minute_as_allowed_are_let_in_and_then_one_as_each_share_of_it_passes(
    quotas: Quotas, clock: Clock
) -> None:
    caller = limited(requests_per_minute=6)
    for _ in range(6):
        quotas.enter(caller)
        quotas.leave(caller)
    assert wait_of(quotas, caller) == 10
    clock.now += 9.5
    assert wait_of(quotas, caller) == 1
    clock.now += 0.5
    quotas.enter(caller)
    assert wait_of(quotas, caller) == 10
    clock.now += 3600
    for _ in range(6):
        quotas.enter(caller)
    assert wait_of(quotas, caller) == 10, "a pause is worth a minute at most"


def test_as_many_at_once_as_allowed_and_one_more_when_one_has_left(quotas: Quotas) -> None:
    caller, other = limited(concurrent_requests=2), limited("other", concurrent_requests=2)
    quotas.enter(caller)
    quotas.enter(caller)
    assert wait_of(quotas, caller) == 1
    quotas.enter(other)
    quotas.leave(caller)
    quotas.enter(caller)


def test_requests_sent_together_get_as_many_places_as_are_left_and_overdraw_the_minute(
    quotas: Quotas, clock: Clock
) -> None:
    caller = limited(concurrent_requests=3, requests_per_minute=6)
    assert quotas.enter(caller) == 1
    assert quotas.enter(caller, 5, 17) == 2
    assert wait_of(quotas, caller) == 1, "three are open"
    quotas.leave(caller, 2)
    assert quotas.enter(caller, 1, 0) == 1, "in the same minute: it was counted when it came"
    quotas.leave(caller, 1)
    assert wait_of(quotas, caller) == 130, "18 of 6 are used, and one more is wanted"
    clock.now += 130
    assert quotas.enter(caller, 5, 1) == 2


def test_tokens_are_counted_as_they_come_and_an_overdraft_is_waited_for(quotas: Quotas, clock: Clock) -> None:
    caller = limited(tokens_per_minute=600)
    quotas.enter(caller)
    quotas.spend(caller, 900)  # it was not known how many there would be
    assert wait_of(quotas, caller) == 31
    clock.now += 30.2
    quotas.enter(caller)


def test_a_refused_request_uses_nothing(quotas: Quotas, clock: Clock) -> None:
    caller = limited(requests_per_minute=1, concurrent_requests=5)
    quotas.enter(caller)
    for _ in range(100):
        wait_of(quotas, caller)
    clock.now += 60
    quotas.enter(caller)


def test_limits_that_change_apply_to_the_next_request_and_open_ones_still_count(quotas: Quotas) -> None:
    quotas.enter(limited(concurrent_requests=5))
    quotas.enter(limited(concurrent_requests=5))
    assert wait_of(quotas, limited(concurrent_requests=2)) == 1
    quotas.leave(limited(concurrent_requests=2))
    quotas.enter(limited(concurrent_requests=2))
    quotas.enter(limited())
