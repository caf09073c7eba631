"""Limits of a key: requests and tokens a minute, requests at once. Each replica counts for itself.

A minute's allowance refills steadily and can be used at once after a pause. Tokens, of prompt and answer, are counted
as they come, so one request may overdraw its allowance; the next ones then wait until it is refilled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.failures import QuotaError
from deploy.keys import Caller, KeyLimits

MINUTE_S = 60.0


class Allowance:
    """What may still be used of an amount per minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._left, self._at = per_minute, float(per_minute), now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is now."""
        self._refill(now)
        return max(0.0, (amount - self._left) * MINUTE_S / self._per_minute)

    def use(self, amount: float, now: float) -> None:
        self._refill(now)
        self._left -= amount

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self._per_minute / MINUTE_S
        self._left, self._at = min(float(self._per_minute), self._left + gained), max(self._at, now)


@dataclass(slots=True)
class _Account:
    limits: KeyLimits
    requests: Allowance | None
    tokens: Allowance | None
    num_open: int = 0


class Quotas:
    """The accounts of all callers with limits. Called on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, caller: Caller, wanted: int = 1, num_requests: int = 1) -> int:
        """Count requests that are sent together; returns how many of them, up to `wanted`, may be open at once, or
        raises QuotaError. What is let in must `leave`.

        More requests than a minute's allowance overdraw it, as tokens do. Of `num_requests` 0 only those at once are
        counted."""
        account, now = self._account(caller), self._clock()
        if account is None:
            return wanted
        limits = account.limits
        if limits.concurrent_requests is not None:
            if account.num_open >= limits.concurrent_requests:
                raise QuotaError(f"this key may have {limits.concurrent_requests} requests open at once", 1)
            wanted = min(wanted, limits.concurrent_requests - account.num_open)
        if num_requests:
            self._check_allowances(account, limits, now)
        account.num_open += wanted
        if account.requests is not None:
            account.requests.use(num_requests, now)
        return wanted

    @staticmethod
    def _check_allowances(account: _Account, limits: KeyLimits, now: float) -> None:
        if account.requests is not None and (wait := account.requests.wait_s(1, now)) > 0:
            raise QuotaError(f"this key may send {limits.requests_per_minute} requests a minute", math.ceil(wait))
        if account.tokens is not None and (wait := account.tokens.wait_s(1, now)) > 0:
            raise QuotaError(f"this key may use {limits.tokens_per_minute} tokens a minute", math.ceil(wait))

    def spend(self, caller: Caller, num_tokens: int) -> None:
        account = self._account(caller) if num_tokens else None
        if account is not None and account.tokens is not None:
            account.tokens.use(num_tokens, self._clock())

    def leave(self, caller: Caller, num_open: int = 1) -> None:
        if (account := self._accounts.get(caller.name)) is not None:
            account.num_open = max(0, account.num_open - num_open)

    def _account(self, caller: Caller) -> _Account | None:
        """The caller's account; a new allowance if its limits have changed."""
        limits, account = caller.limits, self._accounts.get(caller.name)
        if limits == KeyLimits() and account is None:
            return None
        if account is None or account.limits != limits:
            now, num_open = self._clock(), 0 if account is None else account.num_open
            requests = None if limits.requests_per_minute is None else Allowance(limits.requests_per_minute, now)
            tokens = None if limits.tokens_per_minute is None else Allowance(limits.tokens_per_minute, now)
            account = self._accounts[caller.name] = _Account(limits, requests, tokens, num_open)
        return account
