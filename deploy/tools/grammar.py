"""Grammars that force a model to call a tool in its own format: Lark text for `llguidance`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.tools.formats import ToolFormat
from deploy.tools.plan import NO_PARAMETERS, Tool

SPACE = r"[ \n]{0,16}"
"""Space between the parts of JSON. It is limited, for a model may write space for ever where it is not."""
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords with values that are not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with schemas by names, which may be any word."""


def call_schema(tools: Sequence[Tool], arguments_key: str = "arguments") -> dict[str, Any]:
    """JSON Schema of one call of one of the tools: an object with the name and then the arguments."""
    calls = []
    for index, tool in enumerate(tools):
        properties = {"name": {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/tool{index}"}}
        required = ["name", arguments_key]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": {f"tool{index}": arguments_schema(tool, index) for index, tool in enumerate(tools)}}


def calls_schema(tools: Sequence[Tool], arguments_key: str = "arguments", *, one_call: bool = False) -> dict[str, Any]:
    """JSON Schema of a list of calls, at least one and at most one if `one_call`."""
    call = call_schema(tools, arguments_key)
    definitions = call.pop("$defs")
    limit = {"maxItems": 1} if one_call else {}
    return {"type": "array", "items": call, "minItems": 1, **limit, "$defs": definitions}


def arguments_schema(tool: Tool, index: int | None = None) -> dict[str, Any]:
    """JSON Schema of a tool's arguments, which are always an object. `index`: the schema is to stand in another one
    under `#/$defs/tool{index}`, so its own references are moved there."""
    given = tool.parameters
    if not given:
        return {**NO_PARAMETERS, "additionalProperties": False}
    schema = {**given, "type": "object"}
    return schema if index is None else _moved(schema, f"#/$defs/tool{index}")


def forced_call(
    tool_format: ToolFormat, tools: Sequence[Tool], *, one_call: bool, token_ids: Mapping[str, int] | None = None
) -> str:
    """A grammar of exactly the answers that are calls of these tools: one, or one or more.

    `token_ids`: ids of the markers of the format (`tool_format.parser.markers`) that are tokens of their own in the
    model's vocabulary. Models write them as that token; a grammar's text never stands for it."""
    ids = token_ids or {}
    options = _options(tools)
    before, after = _text(tool_format.before, ids), _text(tool_format.after, ids)
    if tool_format.as_list:
        calls = {**calls_schema(tools, tool_format.arguments_key, one_call=one_call), **options}
        return f'start: {before} " "? {_json(calls)}\n'
    if tool_format.name_end is None:
        body = _json({**call_schema(tools, tool_format.arguments_key), **options})
    else:
        end = _text(tool_format.name_end, ids)
        one_of = [f"{_text([tool.name])} {end} {_json({**arguments_schema(tool), **options})}" for tool in tools]
        body = "(" + "\n  | ".join(one_of) + ")"
    more = "" if one_call else f"({_text([tool_format.between])} call)*"
    return f"start: call {more}\ncall: {before} {body} {after}\n"


def _options(tools: Sequence[Tool]) -> dict[str, Any]:
    """How llguidance reads the schema: leniently, unless a tool insists on all of it."""
    lenient = not any(tool.strict for tool in tools)
    return {"x-guidance": {"whitespace_pattern": SPACE, "lenient": lenient, "coerce_one_of": lenient}}


def _text(parts: Sequence[str], ids: Mapping[str, int] | None = None) -> str:
    """Text as the grammar writes it: a token for a marker that is one, else a string."""
    written = [f"<[{ids[part]}]>" if ids and part in ids else json.dumps(part, ensure_ascii=False) for part in parts]
    return " ".join(text for text in written if text != '""')


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _moved(schema: Any, root: str, *, keys_are_names: bool = False) -> Any:
    """The schema with its references to its own root pointing to `root`."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if keys_are_names:
            moved[key] = _moved(value, root)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in _DATA else _moved(value, root, keys_are_names=key in _NAMED)
    return moved
