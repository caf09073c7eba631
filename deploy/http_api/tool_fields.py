"""Fields of chat requests that concern tools: the tools, the choice among them, calls and results in the history.

The two base classes are for the bodies of `openai_requests.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deploy.http_api.ignored_fields import Body
from deploy.tools import plan
from deploy.tools.call_parser import NAME
from deploy.tools.plan import MAX_TOOLS, ToolPlan, arguments_object, tool_plan

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

    @property
    def planned(self) -> plan.Tool:
        function = self.function
        return plan.Tool(function.name, function.description, function.parameters, bool(function.strict))


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


class ChatTools(Body):
    """Base of a chat's body: its tools."""

    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_known_choice)] = (
        None
    )
    """Default: auto."""
    parallel_tool_calls: bool | None = None
    """False: an answer has one call at most."""

    def tool_plan(self) -> ToolPlan:
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        choice = None if isinstance(self.tool_choice, NamedChoice) else self.tool_choice
        tools = [tool.planned for tool in self.tools or ()]
        return tool_plan(tools, choice, named=named, parallel=self.parallel_tool_calls)


def _parsed_arguments(value: object) -> object:
    """Arguments as an object."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        return arguments_object(value)
    except UnicodeEncodeError:
        raise ValueError("Input should be valid Unicode text") from None


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
