"""JSON from outside into checked records: every key known, none missing or twice, every value of its type.

The annotations of the record are the schema. What a record itself refuses is named by its place in the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from tide_core.errors import ArtefactError, FieldError

Record = TypeVar("Record")

OPTIONAL = {"optional": True}
"""Metadata of a field that files made before it was known do not have. It is written only where it is not at its
default, so records that do not need it stay as they were."""


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`, which must be plain JSON: UTF-8, no NaN, no key twice."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(where, str(error), "JSON: UTF-8, no key twice, no NaN or Infinity") from error
    if not isinstance(value, dict):
        raise ArtefactError(where, value, "a JSON object")
    return value


def read(record: type[Record], value: object, where: str) -> Record:
    """`value` as a record of this dataclass."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    if not isinstance(value, dict):
        raise ArtefactError(where, value, f"an object with the keys {', '.join(names)}")
    for key in value:
        if key not in names:
            raise ArtefactError(where, f"the unknown key {key}", f"only the keys {', '.join(names)}")
    for field in fields:
        if field.name not in value and "optional" not in field.metadata:
            raise ArtefactError(f"{where}.{field.name}", "nothing", "a value: the key is missing")
    hints = typing.get_type_hints(record)
    values = {name: _value(hints[name], value[name], f"{where}.{name}") for name in names if name in value}
    try:
        return record(**values)
    except FieldError as error:
        raise ArtefactError(f"{where}.{error.field}", error.value, error.expected) from error


def plain(value: object) -> Any:
    """Records, tuples and mappings as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if "optional" not in field.metadata or getattr(value, field.name) != field.default
        }
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _value(hint: Any, value: object, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ArtefactError(where, value, "a list")
        return tuple(_value(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ArtefactError(where, value, "an object")
        return {key: _value(arguments[1], entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, where)
    return _scalar(hint, value, where)


def _scalar(hint: type, value: object, where: str) -> object:
    if hint is float and type(value) in (int, float):
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    elif type(value) is hint:
        return value
    expected = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}[hint]
    raise ArtefactError(where, value, expected)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} comes twice")
        seen[key] = value
    return seen


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
