"""Validate pydantic models of other packages strictly: no unknown keys, no coercion.

Serve's models ignore unknown keys and coerce `true` to 1, so that newer configs work with older versions; a setting
that may be a plain mapping or a model is not checked at all.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tide_core.errors import ConfigError, refuse_unknown

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], value: object, where: str) -> Model:
    """`value` as the model, with every nested model checked; a ConfigError names the path."""
    for one, child, place in list(_inner(model, value, where)):
        _strict(one, child, place)
    return _strict(model, value, where)


def imported(path: str, where: str) -> Any:
    """The object at an import path, imported as Serve does: with the working directory on the path."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        expected = f"something that can be imported; {type(error).__name__}: {error}"
        raise ConfigError(where, path, expected) from error
    finally:
        sys.path[:] = before


def _inner(model: type[BaseModel], value: object, where: str) -> Iterator[tuple[type[BaseModel], object, str]]:
    """Every nested model of `value` with its path, the innermost first. Refuses unknown keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(where or "config", value, "keys and values")
    refuse_unknown(where or "config", value, list(model.model_fields))
    for name, child in value.items():
        place = f"{where}.{name}".lstrip(".")
        one, many = model_in(model.model_fields[name].annotation)
        if one is None or child is None:
            continue
        if many and not isinstance(child, list):
            raise ConfigError(place, child, "a list")
        for index, part in enumerate(child if many else [child]):
            at = f"{place}[{index}]" if many else place
            yield from _inner(one, part, at)
            yield one, part, at


def model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model in an annotation, direct or in an Optional, and whether it is in a list. Models in a mapping are left
    out: their keys are the user's."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list):
        for part in typing.get_args(annotation):
            model, many = model_in(part)
            if model is not None:
                return model, many or origin is list
    return None, False


def _strict(model: type[Model], value: object, where: str) -> Model:
    try:
        return model.model_validate_json(
            json.dumps(value), strict=True
        )  # from JSON, strict mode accepts text for an enum
    except ValidationError as error:
        raise _named(error, value, where) from error
    except Exception as error:  # validators of other packages raise any type
        expected = f"what {model.__name__} accepts; {type(error).__name__}: {error}"
        raise ConfigError(where or "config", value, expected) from error


def _named(error: ValidationError, value: Any, where: str) -> ConfigError:
    """The first error with its path in the value, without pydantic's names for the members of a union."""
    first = error.errors(include_url=False)[0]
    place = where
    for part in first["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, Mapping) and (part in value or first["type"] == "missing"):
            place, value = f"{place}.{part}".lstrip("."), value.get(part)
        else:
            break
    message = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return ConfigError(place or "config", value, "a value: it is required" if first["type"] == "missing" else message)
