"""Fields of chat requests that concern tools: the tools, the choice among them, calls and results in the history.

The two base classes are for the bodies of `openai_requests.py`. `ToolPlan` is what a request asks for, checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deploy.http_api.ignored_fields import Body
from deploy.http_api.tools.parsers import NAME
from deploy.strict import json_body
from tide_core.errors import RequestError

MAX_TOOLS = 1024
MAX_ARGUMENTS_DEPTH = 64
"""Deepest nesting of arguments in the history, which the limit for bodies does not see: they are JSON in a string."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
CHOICES = 'none, auto, required or {"type": "function", "function": {"name": "…"}}'


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=f"^{NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; None: the function takes none."""
    strict: bool | None = None
    """Whether forced arguments must follow all of the schema. By default what no grammar can express is left out."""


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: always with parameters, which some of them read without asking."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.function.parameters or NO_PARAMETERS}}


class ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    """The choice of one function, which must be called."""

    type: Literal["function"]
    function: ChosenFunction


def _known_choice(value: object) -> object:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError(f"Input should be {CHOICES}")
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f"Input should be {CHOICES}; other types are not supported")
    return value


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
    """Whether a forced answer has exactly one call."""


class ChatTools(Body):
    """Base of a chat's body: its tools."""

    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_known_choice)] = (
        None
    )
    """Default: auto."""
    parallel_tool_calls: bool | None = None
    """False: a forced answer has one call."""

    def tool_plan(self) -> ToolPlan:
        """The checked plan. As with vLLM, the model is told of the tools also where it may not call them."""
        tools, choice = tuple(self.tools or ()), self.tool_choice
        named = choice.function.name if isinstance(choice, NamedChoice) else None
        forced = tuple(tool for tool in tools if choice == "required" or tool.function.name == named)
        if not forced and (named is not None or choice == "required"):
            names = ", ".join(tool.function.name for tool in tools[:16])
            raise RequestError(
                "tool_choice", named or choice, f"one of the tools ({names})" if tools else "tools as well"
            )
        return ToolPlan(
            template_tools=[tool.for_template() for tool in tools] or None,
            reads_calls=bool(tools) and choice != "none",
            forced=forced,
            one_call=named is not None or self.parallel_tool_calls is False,
        )


def _parsed_arguments(value: object) -> object:
    """Arguments as an object, which chat templates expect; clients send the text they were given. Text that is no
    object counts as no arguments: an answer that was cut off leaves such a call, and the chat must go on after it."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        value = json_body.parse(value.encode(), MAX_ARGUMENTS_DEPTH)
    except UnicodeEncodeError:
        raise ValueError("Input should be valid Unicode text") from None
    except RequestError:
        return {}
    return value if isinstance(value, dict) else {}


class CalledFunction(Body):
    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_parsed_arguments, json_schema_input_type=str | dict[str, Any] | None)
    ] = Field(default_factory=dict)
    """An object, or its JSON as text. None and other text count as no arguments."""


class ToolCall(Body):
    """A call that the assistant made earlier."""

    unread: ClassVar[frozenset[str]] = frozenset({"index", "provider_specific_fields", "extra_content"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class MessageTools(Body):
    """Base of a message: the calls of an assistant, or what a call returned (role `tool`)."""

    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    name: str | None = None

    def tool_fields(self, role: str) -> dict[str, Any]:
        """Fields for the chat template besides role and content."""
        if role == "assistant" and self.tool_calls:
            return {"tool_calls": [call.for_template() for call in self.tool_calls]}
        if role != "tool":
            return {}
        return {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key)) is not None}
