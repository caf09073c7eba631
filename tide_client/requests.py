"""Build requests from plain Python values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BadValueError
from tide_client.tools import call_of, choice_of, tools_of

Chat = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, which is text or a list of OpenAI's parts of text; of an assistant also with
`tool_calls`, of role tool with `tool_call_id`."""
Tools = Sequence[Mapping[str, Any]]
"""Functions as OpenAI's API has them: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""
Prompt = str | Sequence[int] | Chat
"""Text, token ids, or a chat."""

MODES = {"full": pb.MODE_FULL, "verified": pb.MODE_VERIFIED, "bounded": pb.MODE_BOUNDED, "fast": pb.MODE_FAST}


class Options(TypedDict, total=False):
    """Options of a generation. protos/tide/v1/tide.proto documents each."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    json_schema: str | Mapping[str, Any]
    """As JSON text or as its object."""
    regex: str
    choices: Sequence[str]
    grammar: str
    mode: str
    """full, verified, bounded or fast."""
    epsilon: float
    margin: float
    threshold: float
    min_layers: int
    n: int
    """Choices: how many answers."""
    tools: Tools
    """For a chat."""
    tool_choice: str | Mapping[str, Any]
    """auto, none, required, or `{"type": "function", "function": {"name": …}}`."""
    parallel_tool_calls: bool
    request_id: str
    model: str
    timeout_s: float
    """Seconds for the whole call, on both sides; default: the client's."""


EXITS = ("epsilon", "margin", "threshold", "min_layers")
OWN = ("request_id", "model", "n", "parallel_tool_calls")
TOOL_FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
"""Fields of a message besides role and content, by its role."""


def given_options(options: Options) -> dict[str, Any]:
    """The options with a value, without the timeout. An unknown name is refused."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"{min(unknown)} is not an option of a generation; known: {', '.join(Options.__annotations__)}")
    for name, kind in (("stop", "string"), ("choices", "string"), ("tools", "object")):
        if isinstance(options.get(name), (str, Mapping)):
            raise TypeError(f"{name} is one {kind}, expected a sequence of them")
    given = {name: value for name, value in options.items() if value is not None and name != "timeout_s"}
    if isinstance(given.get("json_schema"), Mapping):
        given["json_schema"] = json.dumps(given["json_schema"])
    if "mode" in given and given["mode"] not in MODES:
        raise BadValueError(f"mode is {given['mode']!r}, expected {', '.join(MODES)}")
    return given


def request_of(prompt: Prompt, options: Options, timeout_s: float) -> pb.GenerateRequest:
    request = pb.GenerateRequest(timeout_s=timeout_s)
    _set_prompt(request, prompt)
    for name, value in given_options(options).items():
        try:
            if name == "mode":
                request.exits.mode = MODES[value]
            elif name in EXITS:
                setattr(request.exits, name, value)
            elif name in OWN:
                setattr(request, name, value)
            elif name == "tools":
                _set_tools(request, value)
            elif name == "tool_choice":
                request.tool_choice.CopyFrom(choice_of(value))
            else:
                request.sampling_params.MergeFrom(pb.SamplingParams(**{name: value}))
        except BadValueError:
            raise
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else BadValueError
            raise kind(f"{name} is {value!r}: {error}") from None
    return request


def _set_tools(request: pb.GenerateRequest, tools: Tools) -> None:
    if tools and not request.HasField("chat"):
        raise BadValueError("tools are given, expected a chat with them: a list of messages")
    request.chat.tools.extend(tools_of(tools))


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _set_prompt(request: pb.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        request.prompt = prompt
    elif isinstance(prompt, bytes):  # a sequence of integers, but not of token ids
        raise TypeError("prompt is bytes, expected text, token ids or a chat")
    elif is_chat(prompt):
        request.chat.CopyFrom(chat_of(prompt))
    else:
        request.prompt_ids.SetInParent()
        request.prompt_ids.ids.extend(prompt)


def chat_of(messages: Chat, tools: Tools = ()) -> pb.Chat:
    return pb.Chat(messages=[_message(message, index) for index, message in enumerate(messages)], tools=tools_of(tools))


def _message(message: Mapping[str, Any], index: int) -> pb.ChatMessage:
    calls = message.get("tool_calls") or ()
    needed = {"role"} if calls else {"role", "content"}
    known = needed | {"content", *TOOL_FIELDS.get(message.get("role", ""), ())}
    if not needed <= message.keys() <= known:
        expected = "role and content; of an assistant also tool_calls, of a tool tool_call_id and name"
        raise BadValueError(f"message {index} has {', '.join(sorted(message))}, expected {expected}")
    return pb.ChatMessage(
        role=message["role"],
        content=_text_of(message.get("content"), f"message {index}, content"),
        tool_calls=[call_of(call, f"message {index}, tool_calls[{at}]") for at, call in enumerate(calls)],
        tool_call_id=message.get("tool_call_id") or "",
        name=message.get("name") or "",
    )


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [] if content is None else [content]
    for at, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadValueError(f'{where}[{at}] is {found!r}, expected text or {{"type": "text", "text": …}}')
    return "".join(part["text"] for part in parts)


def tokenize_request_of(prompt: str | Chat, tools: Tools = ()) -> pb.TokenizeRequest:
    if not isinstance(prompt, str):
        return pb.TokenizeRequest(chat=chat_of(prompt, tools))
    if tools:
        raise BadValueError("tools are given, expected a chat with them: a list of messages")
    return pb.TokenizeRequest(text=prompt)
