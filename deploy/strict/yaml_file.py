"""Strict YAML: no duplicate keys, no anchors, no tags, no silent conversion to a number, a date or a boolean.

A value that Serve would read differently from how it looks is refused, with the way to write it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from tide_core.errors import ConfigError

MAX_BYTES = 2**20

_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMERIC = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses what SafeLoader converts silently."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            problem = "anchors, aliases and tags are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(key_node, f"the key {key} is not text; quote it")
            if key in seen:
                raise _refusal(key_node, f"the key {key} appears twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _integer(loader: _Loader, node: ScalarNode) -> int:
    value: int = loader.construct_yaml_int(node)
    if not _DECIMAL.fullmatch(node.value):
        raise _refusal(node, f"{node.value} would become {value}; write that, or quote it")
    return value


def _number(loader: _Loader, node: ScalarNode) -> float:
    value: float = loader.construct_yaml_float(node)
    if not math.isfinite(value) or not _NUMERIC.fullmatch(node.value):
        raise _refusal(node, f"{node.value} would become {value}; write a finite decimal number, or quote it")
    return value


def _switch(loader: _Loader, node: ScalarNode) -> bool:
    value: bool = loader.construct_yaml_bool(node)
    if node.value.lower() not in ("true", "false"):
        raise _refusal(node, f"{node.value} would become {str(value).lower()}; write that, or quote it")
    return value


def _text(loader: _Loader, node: ScalarNode) -> str:
    if node.style is None and _NUMERIC.fullmatch(node.value):
        meant = float(node.value)
        shown = int(meant) if meant.is_integer() else meant
        raise _refusal(node, f"{node.value} would become text; write {shown}, or quote it")
    return str(node.value)


def _date(loader: _Loader, node: ScalarNode) -> str:
    raise _refusal(node, f"{node.value} would become a date; quote it")


def _refusal(node: Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_Loader.add_constructor(f"{_TAG}int", _integer)
_Loader.add_constructor(f"{_TAG}float", _number)
_Loader.add_constructor(f"{_TAG}bool", _switch)
_Loader.add_constructor(f"{_TAG}str", _text)
_Loader.add_constructor(f"{_TAG}timestamp", _date)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", str(path), f"a file that can be read: {error.strerror}") from error
    return parse(data, str(path))


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The mapping in `data`; an error names the file, the line and what is wrong there."""
    if len(data) > MAX_BYTES:
        raise ConfigError(where, "more", f"at most {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(where, f"invalid UTF-8 at byte {error.start}", "YAML in UTF-8") from None
    try:
        value = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(where, f"{place}{problem}", "plain YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(where, " ".join(str(error).split()), "plain YAML") from None
    except RecursionError:
        raise ConfigError(where, "unlimited nesting", "plain YAML") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(where, str(error), "plain YAML") from None
    if not isinstance(value, dict):
        raise ConfigError(where, "nothing" if value is None else type(value).__name__, "keys and values")
    return value
