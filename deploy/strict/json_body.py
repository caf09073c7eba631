"""Strict JSON: no duplicate keys, no NaN, limited nesting, no lone surrogates.

Nesting, containers and fields are counted by their brackets and colons before parsing, so that a hostile body costs no
more than reading it.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from itertools import accumulate
from typing import Any, NoReturn

from tide_core.errors import RequestError

MAX_CONTAINERS = 50_000
"""Lists and objects in one body: many times what the longest chat has."""
MAX_FIELDS = 20_000
"""Names of all objects in one body: several for each of the most messages that a chat may have."""
MAX_FLOAT_CHARS = 512

_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or the rest of the data if it does not end, so that matching is linear."""
_BRACKETS = b"[{]}"
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def parse(data: bytes, max_depth: int) -> Any:
    """The value in `data`; a RequestError names the problem without the content."""
    _check_structure(data, max_depth)
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise RequestError("body", f"invalid UTF-8 at byte {error.start}", "JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError("body", f"{error.msg} (character {error.pos})", "JSON") from None
    except _NotJsonError as error:
        raise RequestError("body", str(error), "JSON without it") from None
    except RecursionError:
        raise RequestError("body", "nested JSON", "fewer levels") from None
    except ValueError:  # Python refuses an integer of thousands of digits
        raise RequestError("body", "an integer of thousands of digits", "JSON without it") from None
    if b"\\ud" in data or b"\\uD" in data:
        _refuse_surrogates(value)
    return value


def _check_structure(data: bytes, max_depth: int) -> None:
    """Refuse data with too deep nesting, too many containers or too many fields, by what is outside of strings."""
    many_fields = data.count(b":") > MAX_FIELDS
    if not many_fields and data.count(b"[") + data.count(b"{") <= max_depth:
        return
    outside = _TEXT.sub(b"", data)
    if many_fields and outside.count(b":") > MAX_FIELDS:
        raise RequestError("body", "JSON of many fields", f"at most {MAX_FIELDS} fields")
    steps = array("b", outside.translate(_STEPS, _OTHERS))
    if len(steps) > 2 * MAX_CONTAINERS:
        raise RequestError("body", "JSON of many parts", f"at most {MAX_CONTAINERS} lists and objects")
    if max(accumulate(steps), default=0) > max_depth:
        raise RequestError("body", "nested JSON", f"at most {max_depth} levels")


class _NotJsonError(Exception):
    """Input that Python's reader accepts and JSON forbids."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _NotJsonError("the same key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _NotJsonError(name)


def _finite(digits: str) -> float:
    if len(digits) > MAX_FLOAT_CHARS:
        raise _NotJsonError(f"a number of {len(digits)} characters")
    number = float(digits)
    if not math.isfinite(number):
        raise _NotJsonError("a number without end")
    return number


def _refuse_surrogates(value: Any) -> None:
    """Python's reader accepts a lone surrogate, which cannot be encoded later."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                raise RequestError("body", "half of a surrogate pair", "valid Unicode text") from None
