"""Fields of a client's body that change nothing here: they are dropped before the body is checked.

Clients send fields for their own records, fields that ask for nothing (null, an empty list of tools), and fields that
only other servers know. A model of a body names the first kind in `unread` and the second in `neutral`. A field that
nobody knows is dropped and reported, or refused where the server is strict. A field that would change the answer and is
not supported stays, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from deploy.strict.schema import model_in

MAX_SHOWN, MAX_SHOWN_CHARS = 8, 64


class Body(BaseModel):
    """Base of all bodies and their parts: no coercion, no NaN, and of other fields only those named here."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    unread: ClassVar[frozenset[str]] = frozenset()
    """Dropped, whatever their value."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Dropped if they have one of these values."""
    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Refused by name, unless null."""
    closed: ClassVar[bool] = False
    """Whether a field that nobody knows is refused here even by a server that is not strict."""

    @classmethod
    def refused_names(cls) -> frozenset[str]:
        """Fields that others have and that are not supported here."""
        return cls.unsupported | cls.neutral.keys()


def unsupported(text: str) -> PydanticCustomError:
    """The error of a validator for what would change the answer and is not supported."""
    return PydanticCustomError("unsupported", "{text}", {"text": f"this is not supported here: {text}"})


def without_ignored(model: type[Body], value: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """The body without fields that change nothing, and the paths of those that nobody knows."""
    unknown: list[str] = []
    return _cleaned(model, value, "", unknown, strict), unknown


def shown(unknown: Sequence[str]) -> str:
    """Names for a header: some, short, and of plain characters."""
    names = ["".join(c for c in name if c.isascii() and (c.isalnum() or c in "._-")) for name in unknown[:MAX_SHOWN]]
    more = [f"and {len(unknown) - MAX_SHOWN} more"] if len(unknown) > MAX_SHOWN else []
    return ", ".join([*(name[:MAX_SHOWN_CHARS] for name in names), *more])


def _cleaned(model: type[Body], value: Any, where: str, unknown: list[str], strict: bool) -> Any:
    if not isinstance(value, dict):
        return value  # the model says what it expects
    kept, fields = {}, {field.alias or name: field for name, field in model.model_fields.items()}
    for name, child in value.items():
        field = fields.get(name)
        if field is not None:
            if child is not None or field.is_required():
                kept[name] = _inside(field.annotation, child, f"{where}{name}", unknown, strict)
        elif name in model.unread or any(_same(child, one) for one in model.neutral.get(name, ())):
            continue
        elif name in model.neutral or name in model.unsupported:
            if child is not None:
                kept[name] = child
        elif strict or model.closed:
            kept[name] = child
        else:
            unknown.append(f"{where}{name}")
    return kept


def _inside(annotation: Any, value: Any, where: str, unknown: list[str], strict: bool) -> Any:
    """The same for the models in a field."""
    model, many = model_in(annotation)
    if model is None or not issubclass(model, Body):
        return value
    if many and isinstance(value, list):
        return [_cleaned(model, one, f"{where}.{index}.", unknown, strict) for index, one in enumerate(value)]
    return _cleaned(model, value, f"{where}.", unknown, strict)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
