"""Fields of a chat: its messages and what the model's template reads besides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from deploy.http_api.ignored_fields import Body, unsupported
from deploy.http_api.tool_fields import ChatTools, MessageTools
from tide_core.errors import RequestError
from tide_core.request import Chat

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class TextPart(Body):
    """A part of a message's content: text alone. A refusal of the assistant is text for the next turn."""

    unread: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str = ""
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"text": value}
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            raise unsupported(f"content is text ({' or '.join(TEXT_PARTS[:3])}), not {kind[:40]}")
        wanted = "refusal" if kind == "refusal" else "text"
        if isinstance(value, dict) and value.get(wanted) is None:
            raise ValueError(f"a part of type {kind} needs {wanted}" if kind else "a part needs type and text")
        return {**value, "text": value["refusal"]} if kind == "refusal" else value


class Message(MessageTools):
    unread: ClassVar[frozenset[str]] = frozenset(
        {"refusal", "annotations", "reasoning", "reasoning_content", "provider_specific_fields"}
    )
    unsupported: ClassVar[frozenset[str]] = frozenset({"audio", "function_call"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """None only of the assistant, whose answer may have been empty."""

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **self.tool_fields(role)}


class ChatPrompt(ChatTools):
    """Fields of a chat that the model's template reads, besides the messages."""

    add_generation_prompt: bool | None = None
    """Whether the prompt ends where an answer of the assistant begins; default true."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message; only without `add_generation_prompt`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    def chat_of(self, messages: Sequence[Message]) -> Chat:
        if self.add_generation_prompt is not False and self.continue_final_message:
            raise RequestError("continue_final_message", True, "add_generation_prompt: false with it")
        return Chat(
            [message.for_template() for message in messages],
            self.tool_plan().template_tools or (),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )
