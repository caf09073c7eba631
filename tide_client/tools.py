"""Tools as plain Python values, in the form that OpenAI's API has them, and as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BadValueError

TOOL_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
CHOICES = f'{", ".join(TOOL_MODES)} or {{"type": "function", "function": {{"name": …}}}}'
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model made."""

    id: str
    name: str
    arguments: str
    """A JSON object as text; in an answer that `max_tokens` cut off it may be incomplete."""


def tool_of(tool: Mapping[str, Any], index: int) -> pb.Tool:
    """A tool such as `{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}`."""
    where = f"tools[{index}]"
    function = _function(tool, where)
    unknown = function.keys() - set(FUNCTION_FIELDS)
    if unknown:
        raise BadValueError(f"{where}.function has {min(unknown)!r}, expected {', '.join(FUNCTION_FIELDS)}")
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )


def call_of(call: ToolCall | Mapping[str, Any], where: str) -> pb.ToolCall:
    """A call of the history, as an answer has it or as OpenAI writes it."""
    if isinstance(call, ToolCall):
        return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    function = _function(call, where)
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return pb.ToolCall(id=call.get("id") or "", name=function["name"], arguments=text)


def choice_of(choice: str | Mapping[str, Any]) -> pb.ToolChoice:
    if isinstance(choice, str) and choice in TOOL_MODES:
        return pb.ToolChoice(mode=TOOL_MODES[choice])
    if isinstance(choice, str):
        raise BadValueError(f"tool_choice is {choice!r}, expected {CHOICES}")
    return pb.ToolChoice(name=_function(choice, "tool_choice")["name"])


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[pb.Tool]:
    return [tool_of(tool, index) for index, tool in enumerate(tools)]


def _function(value: Any, where: str) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadValueError(f'{where} is {value!r}, expected {{"type": "function", "function": {{"name": …}}}}')
    return function
