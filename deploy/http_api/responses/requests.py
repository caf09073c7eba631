"""Body of POST /v1/responses, and the chat, parameters and tools that it stands for. No server here.

Sampling fields and their checks are those of chats. What needs stored responses is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from deploy.http_api.chat_fields import Message, TextPart
from deploy.http_api.ignored_fields import Body, unsupported
from deploy.http_api.openai_requests import Sampling, StreamOptions
from deploy.http_api.structured_fields import ResponseFormat
from deploy.http_api.tool_fields import (
    CalledFunction,
    ChatTools,
    ChosenFunction,
    Function,
    NamedChoice,
    Tool,
    ToolCall,
)
from deploy.tools.plan import MAX_TOOLS, ToolPlan
from tide_core.errors import RequestError
from tide_core.request import Chat, Grammar

MAX_ITEMS = 1000
CHOICES = 'none, auto, required or {"type": "function", "name": "…"}'
LOGPROBS = "message.output_text.logprobs"
STATE = "the server keeps no state; send all earlier items in input"
NEEDS = {"message": ("role", "content"), "function_call": ("call_id", "name"), "function_call_output": ("call_id",)}
"""Fields that an item must have, by its type."""


def _refuse(text: str) -> Callable[[object], NoReturn]:
    """A check of a field that may only be null or missing."""

    def refuse(_: object) -> NoReturn:
        raise unsupported(text)

    return refuse


def _parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[TextPart] | None, BeforeValidator(_parts, json_schema_input_type=str | list[TextPart] | None)]
"""Text, or parts with text."""


class Item(CalledFunction):
    """One item of the input: a message, a call that the model made, or what a call returned."""

    unread: ClassVar[frozenset[str]] = frozenset(
        {"id", "status", "phase", "caller", "namespace", "summary", "encrypted_content"}
    )

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: str | None = None
    name: str = ""
    output: Content = None
    """What a call returned."""

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "item_reference":
            raise unsupported(STATE)
        if isinstance(kind, str) and kind not in NEEDS:
            raise unsupported(f"items are {', '.join(NEEDS)}, not {kind[:40]}")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Item:
        missing = [name for name in NEEDS[self.type] if getattr(self, name) in (None, "")]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {' and '.join(missing)}")
        return self

    def message(self) -> Message:
        """The message of a chat that it stands for."""
        if self.type == "function_call":
            function = CalledFunction(name=self.name, arguments=self.arguments)
            return Message(role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)])
        if self.type == "function_call_output":
            return Message(role="tool", tool_call_id=self.call_id, content=self.output or [])
        return Message(role=self.role or "user", content=self.content or [])


def _items(value: object) -> object:
    """Text as the message of a user. Items of reasoning are left out: no chat has them."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [item for item in value if not (isinstance(item, dict) and item.get("type") == "reasoning")]


class FunctionTool(Function):
    """A function that the model may call, in the flat form."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") != "function":
            raise unsupported("tools are of type function")
        return value


class FunctionChoice(Body):
    """The choice of one function, which must be called."""

    type: Literal["function"]
    name: str


def _known_choice(value: object) -> object:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise PydanticCustomError("choice", "{text}", {"text": f"Input should be {CHOICES}"})
    if isinstance(value, dict) and value.get("type") != "function":
        raise unsupported(f"the choice is {CHOICES}")
    return value


class TextFormat(Body):
    """What the text must be, in the flat form."""

    unread: ClassVar[frozenset[str]] = frozenset({"description"})

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type json_schema needs schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        found = ResponseFormat(type=self.type, json_schema={"schema": self.schema_}).grammar
        return None if found is None else replace(found, field="text.format")

    def echo(self) -> dict[str, Any]:
        """As a response repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "name": self.name or "", "schema": self.schema_, "strict": self.strict}


class TextOptions(Body):
    unread: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


def _in_foreground(value: object) -> object:
    if value is True:
        raise unsupported("the server keeps no state, so that nobody could fetch the response later")
    return value


class ResponseRequest(Sampling):
    """Body of POST /v1/responses."""

    unread: ClassVar[frozenset[str]] = Sampling.unread | {"access_programs", "image", "max_tool_calls", "reasoning"}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **Sampling.neutral,
        "truncation": ("disabled", "auto"),
    }
    unsupported: ClassVar[frozenset[str]] = Sampling.unsupported | {"context_management"}

    input: Annotated[list[Item], BeforeValidator(_items, json_schema_input_type=str | list[Item])] = Field(
        min_length=1, max_length=MAX_ITEMS
    )
    """Text, or the items of the conversation so far."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    """Goes before `max_tokens`, its name in other requests."""
    n: Literal[1] | None = None
    """A response has one answer."""
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | None, BeforeValidator(_known_choice)
    ] = None
    """Default: auto."""
    parallel_tool_calls: bool | None = None
    """False: an answer has one call at most."""
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the response."""
    stream_options: Annotated[StreamOptions | None, BeforeValidator(lambda _: None)] = None
    """Changes nothing: every stream ends with the usage."""
    include: list[str] | None = None
    """With `message.output_text.logprobs` the text has log-probabilities; others change nothing."""
    top_logprobs: int | None = None
    """Log-probabilities of so many likeliest tokens for each token, where they are included."""
    background: Annotated[Literal[False] | None, BeforeValidator(_in_foreground)] = None
    previous_response_id: Annotated[None, BeforeValidator(_refuse(STATE))] = None
    conversation: Annotated[None, BeforeValidator(_refuse(STATE))] = None
    prompt: Annotated[None, BeforeValidator(_refuse("the server keeps no prompt templates; send input"))] = None

    @property
    def chat(self) -> Chat:
        """The chat that the instructions and items stand for."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        for item in self.input:
            message = item.message()
            last = messages[-1] if messages else None
            if item.type == "function_call" and last is not None and last.role == "assistant":
                # The text of a turn and its calls are one message of a chat.
                calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
                messages[-1] = last.model_copy(update={"tool_calls": calls})
            else:
                messages.append(message)
        return Chat([message.for_template() for message in messages], self.tool_plan().template_tools or ())

    @property
    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def grammar(self) -> Grammar | None:
        asked, other = self.text_format.grammar, super().grammar
        if asked is not None and other is not None:
            raise RequestError(asked.field, other.field, "only one way to structure the output")
        return asked or other

    def tool_plan(self) -> ToolPlan:
        """As of a chat, which names functions one level deeper."""
        choice = self.tool_choice
        nested = (
            NamedChoice(type="function", function=ChosenFunction(name=choice.name))
            if isinstance(choice, FunctionChoice)
            else choice
        )
        tools = [Tool(type="function", function=tool) for tool in self.tools or ()]
        return ChatTools(tools=tools, tool_choice=nested, parallel_tool_calls=self.parallel_tool_calls).tool_plan()

    def params(self) -> dict[str, Any]:
        most = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        logprobs = (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None
        return {**super().params(), "max_tokens": most, "logprobs": logprobs}

    def echo(self) -> dict[str, Any]:
        """Settings as a response repeats them."""
        choice = self.tool_choice or "auto"
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": self.text_format.echo()},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
        }
