"""Frozen objects at the price of others.

A frozen dataclass fills its fields through `object.__setattr__`, which costs several times a plain assignment; where
an object is made for every token, that is most of what the token costs. `quick(kind)` fills the slots of a twin that is
not frozen and turns it into a `kind`: the same class, equally frozen, made with the same arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def quick(kind: Callable[P, T]) -> Callable[P, T]:
    """A quicker way to call `kind`, a frozen dataclass with slots that does nothing else when it is made."""
    assert isinstance(kind, type)
    assert "__slots__" in vars(kind), "a twin has slots, and both must be alike"
    assert not hasattr(kind, "__post_init__"), "it would not be called"

    def become_kind(made: Any) -> None:
        made.__class__ = kind

    twin = dataclasses.make_dataclass(
        kind.__name__,
        [(field.name, field.type, _like(field)) for field in dataclasses.fields(kind)],
        namespace={"__post_init__": become_kind},
        slots=True,
    )
    return cast(Callable[P, T], twin)


def _like(field: dataclasses.Field[Any]) -> Any:
    options: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
    return dataclasses.field(**options, kw_only=field.kw_only)
