"""What can go wrong with a call, as callers see it."""

from __future__ import annotations

from typing import Any

RETRY_BEFORE_FIRST_TOKEN = ("UNAVAILABLE", "CANCELLED")
"""Nothing had come, so asking again loses nothing. A proxy tells the death of a replica as CANCELLED; a call that the
client cancels itself never comes here."""


class TideClientError(Exception):
    """Base of all errors of this package."""


class BadValueError(TideClientError, ValueError):
    """A value that was refused here, before anything was sent."""


class StatusError(TideClientError):
    """The server answered with a status other than OK."""

    def __init__(self, code: str, details: str, num_tokens: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(code, details, num_tokens, retry_after_s)
        self.code, self.details, self.num_tokens = code, details, num_tokens
        self.retry_after_s = retry_after_s
        """When the server says it is worth asking again; it may not say."""

    def __str__(self) -> str:
        after = f" after {count(self.num_tokens)}" if self.num_tokens else ""
        return f"{self.code}{after}: {self.details}"

    @property
    def may_be_retried(self) -> bool:
        return self.num_tokens == 0 and self.code in RETRY_BEFORE_FIRST_TOKEN


class BrokenStreamError(TideClientError):
    """An answer that ended without its last word, or lost a piece."""


def count(num_tokens: int) -> str:
    return f"{num_tokens} token{'' if num_tokens == 1 else 's'}"


def status_error(error: Any, num_tokens: int = 0) -> StatusError:
    """A `grpc.RpcError` as we tell it."""
    given = dict(error.trailing_metadata() or ()).get("retry-after")
    return StatusError(error.code().name, error.details() or "", num_tokens, seconds(given))


def seconds(header: str | bytes | None) -> float | None:
    """Of a Retry-After; the form with a date is not read."""
    text = header.decode(errors="replace") if isinstance(header, bytes) else header or ""
    return float(text) if text.isascii() and text.isdecimal() else None
