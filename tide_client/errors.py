"""Errors of the client."""

from __future__ import annotations

from typing import Any

TRANSIENT = ("UNAVAILABLE", "CANCELLED")
"""No server answered, or it went away. A proxy reports a dead replica as CANCELLED; a call that the client cancels
itself is never retried."""


class TideClientError(Exception):
    """Base of all errors of this package."""


class BadValueError(TideClientError, ValueError):
    """A value that the client refuses before it sends anything."""


class StatusError(TideClientError):
    """The server answered with a status other than OK."""

    def __init__(self, code: str, details: str, num_tokens: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(code, details, num_tokens, retry_after_s)
        self.code, self.details, self.num_tokens = code, details, num_tokens
        self.retry_after_s = retry_after_s
        """Seconds from the server's Retry-After, if it sent one."""

    def __str__(self) -> str:
        after = f" after {count(self.num_tokens)}" if self.num_tokens else ""
        return f"{self.code}{after}: {self.details}"

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may succeed."""
        return self.code in TRANSIENT

    @property
    def was_turned_away(self) -> bool:
        """Whether the server closed the connection to new calls before it saw this one. gRPC says so in words alone."""
        return self.code == "UNAVAILABLE" and "GOAWAY received" in self.details


class BrokenStreamError(TideClientError):
    """An answer that ended without its final message, or lost a chunk."""


def count(num_tokens: int) -> str:
    return f"{num_tokens} token{'' if num_tokens == 1 else 's'}"


def status_error(error: Any, num_tokens: int = 0) -> StatusError:
    """The StatusError for a `grpc.RpcError`."""
    given = dict(error.trailing_metadata() or ()).get("retry-after")
    return StatusError(error.code().name, error.details() or "", num_tokens, seconds(given))


def seconds(header: str | bytes | None) -> float | None:
    """Seconds of a Retry-After header; None for its form with a date."""
    text = header.decode(errors="replace") if isinstance(header, bytes) else header or ""
    return float(text) if text.isascii() and text.isdecimal() else None
