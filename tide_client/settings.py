"""What all calls of one client have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tide_client.errors import BadValueError

DEFAULT_ADDRESS = "127.0.0.1:9000"
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 86_400.0
DEFAULT_RETRIES = 3
MAX_MESSAGE_BYTES = 64 * 2**20
FIRST_RECONNECT_MS, LAST_RECONNECT_MS = 100, 5000
PING_EVERY_MS, PING_TIMEOUT_MS = 60_000, 10_000
"""While a call is open. A machine that is lost says nothing, and all calls of its connection would wait in vain for a
quarter of an hour. HAProxy takes any number of pings; gRPC's own servers end a connection at the fifth without an
answer between them, which is above the longest answer at once a minute."""


@dataclass(frozen=True, slots=True)
class Settings:
    api_key: str | None = field(default=None, repr=False)
    application: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Of every call that is not given another: none goes without a deadline."""
    retries: int = DEFAULT_RETRIES
    """How often a call is made again that failed before its first token because nobody was there."""

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
    """Refuse what no header can hold, here and without repeating it: a library's own error would show the key."""
    if api_key is not None and not fits_a_header(api_key):
        raise BadValueError("api_key is not shown here, expected printable ASCII characters without spaces")


def channel_options() -> list[tuple[str, int]]:
    """Room for long answers; a server that comes back is found about as soon as a call is made again; and one that is
    lost without a word is noticed."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LAST_RECONNECT_MS),
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ]


def fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text
