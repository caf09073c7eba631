"""Errors that callers can catch. A client error names the field, the value and what was expected.

All arguments go to the base constructor, so that an error survives pickling between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_SHOWN_CHARS = 80


class TideError(Exception):
    """Base of all errors raised on purpose by TIDE Serve."""


class FieldError(TideError):
    """A refused value: `field`, the given `value`, and what was `expected`."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, _brief(value), expected)

    @property
    def field(self) -> str:
        return str(self.args[0])

    @property
    def value(self) -> object:
        return self.args[1]

    @property
    def expected(self) -> str:
        return str(self.args[2])

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, _Summary) else repr(self.value)
        return f"{self.field}: got {shown}, expected {self.expected}"


class ConfigError(FieldError):
    """A refused setting; nothing has started."""


class RequestError(FieldError):
    """A refused request; the engine keeps running (4xx)."""


class ModelError(FieldError):
    """A model that cannot be found, read or proven equal to its Hugging Face forward."""


class ArtefactError(FieldError):
    """An artefact that cannot be read or written, is incomplete, or was made for another model."""


class EngineError(TideError):
    """The engine failed a valid request (5xx)."""


class EngineBusyError(EngineError):
    """The queue is full; the same request may succeed later (429)."""


class EngineDeadError(EngineError):
    """The engine loop has stopped; no submitted request will run."""


class _Summary(str):
    """Describes a value that is too large to show in an error."""

    __slots__ = ()


def refuse_unknown(what: str, given: Iterable[object], known: Sequence[str]) -> None:
    """Raise ConfigError for an unknown key, with the nearest known one."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(what, key, f"a known key; {hint}")


def one_line(error: BaseException) -> str:
    """Type and first line of an error of another library, for use in an error of this one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _brief(value: object) -> object:
    """A small picklable stand-in for `value`; idempotent."""
    if value is None or isinstance(value, (bool, float, _Summary)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**MAX_SHOWN_CHARS else _Summary(f"an integer of {value.bit_length()} bits")
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        shown = repr(value) if len(value) <= 8 else ""
        if shown and len(shown) <= MAX_SHOWN_CHARS:
            return _Summary(shown)
        return _Summary(f"a {type(value).__name__} of {len(value)} entries")
    text = value if isinstance(value, str) else str(value)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    end = (
        MAX_SHOWN_CHARS // 2 if "/" in text and " " not in text else 0
    )  # the end of a path or a URL is its most telling part
    return f"{text[: MAX_SHOWN_CHARS - 1 - end]}…{text[len(text) - end :]}"
