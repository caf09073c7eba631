"""Values of options that are more than one number or word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from tide_core.config import AUTO
from tide_core.errors import ConfigError

Number = TypeVar("Number", int, float)


def numbers(
    option: str,
    text: str,
    kind: Callable[[str], Number],
    expected: str,
    between: tuple[float, float] = (-math.inf, math.inf),
) -> list[Number]:
    """The numbers of a text such as `1,8,32`, in its order."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(option, text, expected) from None
    if not all(between[0] <= number <= between[1] for number in found):
        raise ConfigError(option, text, expected)
    return found


def number_or_auto(option: str, text: str) -> float | str:
    """A number, or the word auto."""
    if text == AUTO:
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(option, text, "auto, or a number") from None


def integer_or_auto(option: str, text: str) -> int | str:
    """An integer, or the word auto."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(option, text, "auto, or an integer") from None
