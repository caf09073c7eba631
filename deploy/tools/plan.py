"""What a request asks of tools, checked, whichever API it came through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.strict import json_body
from deploy.tools.call_parser import NAME
from tide_core.errors import RequestError

MAX_TOOLS = 1024
MAX_ARGUMENTS_DEPTH = 64
"""Deepest nesting of arguments in the history, which the limit for bodies does not see: they are JSON in a string."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
NONE, AUTO, REQUIRED = "none", "auto", "required"

_NAME = re.compile(NAME)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; None: the function takes none."""
    strict: bool = False
    """Whether forced arguments must follow all of the schema. By default what no grammar can express is left out."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: always with parameters, which some of them read without asking."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.parameters or NO_PARAMETERS}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request asks of tools."""

    template_tools: list[dict[str, Any]] | None
    """For `apply_chat_template(messages, tools=…)`."""
    reads_calls: bool
    """Whether calls are looked for in the answer. Otherwise all of it is content."""
    forced: tuple[Tool, ...]
    """One of these must be called. Empty: the model decides."""
    one_call: bool
    """Whether an answer has one call at most; a forced one has exactly one."""


def tool_plan(
    tools: Sequence[Tool], choice: str | None = None, *, named: str | None = None, parallel: bool | None = None
) -> ToolPlan:
    """The checked plan. `choice`: none, auto or required; default: auto. `named`: the function that must be called,
    instead of a choice. `parallel` false: an answer has one call at most.

    As with vLLM, the model is told of the tools also where it may not call them."""
    forced = tuple(tool for tool in tools if choice == REQUIRED or tool.name == named)
    if not forced and (named is not None or choice == REQUIRED):
        names = ", ".join(tool.name for tool in tools[:16])
        raise RequestError("tool_choice", named or choice, f"one of the tools ({names})" if tools else "tools as well")
    return ToolPlan(
        template_tools=[tool.for_template() for tool in tools] or None,
        reads_calls=bool(tools) and choice != NONE,
        forced=forced,
        one_call=named is not None or parallel is False,
    )


def is_tool_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call in the history as an object, which chat templates expect; clients send the text they were
    given. Text that is no object counts as no arguments: an answer that was cut off leaves such a call, and the chat
    must go on after it. Raises UnicodeEncodeError for text with half a character."""
    try:
        value = json_body.parse(text.encode(), MAX_ARGUMENTS_DEPTH)
    except RequestError:
        return {}
    return value if isinstance(value, dict) else {}
