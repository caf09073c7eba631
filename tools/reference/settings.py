"""Read the settings of a class: the docstrings of its fields, and the values that the code accepts.

The allowed values come from the error that the code raises for a bad one, so that the reference cannot differ from it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from tide_core.errors import ConfigError
from tools.reference.markdown import code


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a settings class."""

    name: str
    type: str
    default: str
    allowed: str
    text: str
    group: str = ""


def documented(owner: type) -> dict[str, tuple[str, str, str]]:
    """Fields of a class in order: annotation, docstring, and the comment that heads its group."""
    source = textwrap.dedent(inspect.getsource(owner))
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    heads = {
        number: found[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (found := re.fullmatch(r"    # (\w+)", line))
    }
    found_fields = {}
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value = after.value if isinstance(after, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
        group = [heads[line] for line in sorted(heads) if line < statement.lineno][-1:]
        found_fields[statement.target.id] = (ast.unparse(statement.annotation), inspect.cleandoc(text), "".join(group))
    return found_fields


def in_words(annotation: str) -> str:
    """A type in the words of YAML."""
    words = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "None": "none",
        "tuple[int, ...]": "list of whole numbers",
        "tuple[float, ...]": "list of numbers",
        "tuple[str, ...]": "list of texts",
        "list[str]": "list of texts",
        "dict[str, Any]": "mapping",
    }
    if annotation == "bool | None":
        return "true, false or none"
    return " or ".join(words.get(part, f"[{part}](#{part.lower()})") for part in annotation.split(" | "))


def shown(value: object) -> str:
    """A default in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, (tuple, list)):
        return code(f"[{', '.join(map(str, value))}]")
    if isinstance(value, Mapping):
        return code("{}")
    return code(f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 100_000 else value)


def refusal(build: Callable[[dict[str, Any]], object], name: str, context: Mapping[str, Any], bad: object) -> str:
    """What the error for a bad value says was expected; empty if every value is accepted."""
    try:
        build({**context, name: bad})
    except ConfigError as error:
        return error.expected if error.field.rpartition(".")[2] == name else ""
    except ValidationError as error:
        found = re.search(r"expected (.+)", error.errors()[0]["msg"])
        return found[1] if found else ""
    return ""


def of_dataclass(owner: Any) -> Iterator[Setting]:
    """Settings of a dataclass that checks itself when constructed."""
    texts = documented(owner)
    for field in fields(owner):
        annotation, text, group = texts[field.name]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        allowed = refusal(lambda given: owner(**given), field.name, {}, object())
        yield Setting(field.name, in_words(annotation), shown(default), allowed, text, group)


def of_model(
    owner: type[BaseModel], *, build: Callable[[dict[str, Any]], object] | None = None, context: Any = None
) -> Iterator[Setting]:
    """Settings of a pydantic model. `context` maps a field's name to other values that its check needs, and optionally
    to the bad value to try."""
    for name, (annotation, text, group) in documented(owner).items():
        field = owner.model_fields.get(name)
        if field is None:
            continue
        default = field.get_default(call_default_factory=True)
        allowed = "; ".join(bounds(field.metadata))
        if not allowed and ("str" in annotation or "float" in annotation):
            around = dict((context or {}).get(name, (context or {}).get("", {})))
            bad = around.pop(name, "?")
            allowed = refusal(build or owner.model_validate, name, around, bad)
        needed = default is PydanticUndefined
        default_text = "**required**" if needed else "below" if isinstance(default, BaseModel) else shown(default)
        yield Setting(name, in_words(annotation), default_text, allowed, text, group)


def bounds(metadata: Iterable[object]) -> Iterator[str]:
    """Limits of a pydantic field, in words."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    lengths = {"min_length": "at least {} long", "max_length": "at most {} long"}
    for item in metadata:
        for attribute, word in words.items():
            if (value := getattr(item, attribute, None)) is not None:
                yield f"{word} {value}"
        for attribute, pattern in lengths.items():
            if (value := getattr(item, attribute, None)) is not None:
                yield pattern.format(value)
        if (value := getattr(item, "pattern", None)) is not None:
            yield f"matches {code(value)}"
