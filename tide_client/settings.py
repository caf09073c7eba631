"""Settings that all calls of one client share: address, key, deadlines, retries."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from tide_client.errors import BadValueError, StatusError

DEFAULT_ADDRESS = "127.0.0.1:9000"
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 86_400.0
DEFAULT_RETRIES = 3
MAX_MESSAGE_BYTES = 64 * 2**20
FIRST_RECONNECT_MS, LAST_RECONNECT_MS = 100, 5000
PING_EVERY_MS, PING_TIMEOUT_MS = 60_000, 20_000
"""Pings while a call is open, so that a lost machine is noticed; without them calls would wait a quarter of an hour.
HAProxy accepts any number of pings; gRPC's own servers close a connection at the fifth ping without data in between,
which at one ping a minute is longer than the longest answer."""


@dataclass(frozen=True, slots=True)
class Settings:
    api_key: str | None = field(default=None, repr=False)
    application: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Default deadline of a call; every call has one."""
    retries: int = DEFAULT_RETRIES
    """Retries of a call that failed because no server answered, or it went away: before the first token, and with
    `resume` also after it."""
    resume: bool = False
    """Resume a stream that broke after its first token, if its request is greedy or has a seed."""

    def __post_init__(self) -> None:
        check_key(self.api_key)
        if self.application is not None and not fits_a_header(self.application):
            raise BadValueError(f"application is {self.application!r}, expected printable ASCII characters")
        check_timeout(self.timeout_s)
        if self.retries < 0:
            raise BadValueError(f"retries is {self.retries!r}, expected 0 or more")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        pairs = []
        if self.api_key is not None:
            pairs.append(("authorization", f"Bearer {self.api_key}"))
        if self.application is not None:
            pairs.append(("application", self.application))
        return tuple(pairs)

    def timeout_of(self, given: float | None) -> float:
        return self.timeout_s if given is None else check_timeout(given)


def check_timeout(timeout_s: float) -> float:
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise BadValueError(f"timeout_s is {timeout_s!r}, expected seconds above 0, at most {MAX_TIMEOUT_S:g}")
    return timeout_s


def check_key(api_key: str | None) -> None:
    """Refuse a key that no header can hold, without showing it; a library's own error would show the key."""
    if api_key is not None and not fits_a_header(api_key):
        raise BadValueError("api_key is not shown here, expected printable ASCII characters without spaces")


def channel_options() -> list[tuple[str, int]]:
    """Allow long messages, reconnect about as soon as a retry happens, and notice a lost server."""
    return [
        ("grpc.enable_retries", 0),  # see connection.py; the client has its own
        ("grpc.use_local_subchannel_pool", 1),  # or another channel to this address would have the same connection
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LAST_RECONNECT_MS),
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ]


def fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_DOUBLINGS = 10
MOST_TURNED_AWAY = 6
"""Attempts that a call has beside its retries while no server begins with it; they take some five seconds."""


class Attempts:
    """Retry budget and deadline of one call."""

    def __init__(self, settings: Settings, timeout_s: float) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._max_retries = settings.retries
        self.num_retries = 0
        self._num_turned_away = 0

    @property
    def needs_another_channel(self) -> bool:
        """Whether the last failure was one that the same channel would repeat."""
        return self._num_turned_away > 1

    @property
    def left_s(self) -> float:
        """Seconds until the deadline that all attempts share."""
        return max(0.0, self._ends_at - time.monotonic())

    def pause_s(self, failure: StatusError, *, can_follow: bool = True) -> float:
        """Seconds to wait before the next attempt: exponential backoff with jitter. Raises `failure` if the call must
        not be retried; `can_follow`: whether it could be."""
        was_turned_away = failure.was_turned_away and self._num_turned_away < MOST_TURNED_AWAY
        num_before = self._num_turned_away if was_turned_away else self.num_retries
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_before, MAX_DOUBLINGS))
        pause_s = random.uniform(longest / 2, longest) + (failure.retry_after_s or 0.0)  # noqa: S311  # not a secret
        has_retries = was_turned_away or self.num_retries < self._max_retries
        if not (can_follow and failure.is_transient and has_retries) or pause_s >= self.left_s:
            raise failure from None
        if was_turned_away:
            self._num_turned_away += 1
        else:
            self._num_turned_away = 0
            self.num_retries += 1
        return pause_s
