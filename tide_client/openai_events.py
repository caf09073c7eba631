"""Convert OpenAI's bodies and events, with TIDE's extra fields, to and from plain records. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tide_client.assembly import AnswerBuilder
from tide_client.errors import BadValueError, BrokenStreamError, StatusError, count
from tide_client.requests import Options, Prompt, given_options, is_chat
from tide_client.results import Answer, ExitSummary, Token, Usage

EXITS = ("mode", "epsilon", "margin", "threshold", "min_layers")
NOT_OVER_HTTP = ("request_id", "logprobs", "n", "tools", "tool_choice", "parallel_tool_calls")
HTTP_NAMES = {
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choices": "guided_choice",
    "grammar": "guided_grammar",
}
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)


def request_of(prompt: Prompt, options: Options, timeout_s: float) -> tuple[str, bytes]:
    """Path and body. Defaults are those of gRPC: greedy."""
    given = given_options(options)
    for name in NOT_OVER_HTTP:
        if name in given:
            raise BadValueError(f"{name} is given, expected none over HTTP")
    tide = {name: given.pop(name) for name in EXITS if name in given}
    given = {HTTP_NAMES.get(name, name): value for name, value in given.items()}
    body: dict[str, Any] = {"temperature": 0.0, **given, "stream": True, "stream_options": {"include_usage": True}}
    body["tide"] = {**tide, "tokens": True, "timeout_s": timeout_s}
    if is_chat(prompt):
        return "/v1/chat/completions", _bytes({**body, "messages": list(prompt)})
    return "/v1/completions", _bytes({**body, "prompt": prompt if isinstance(prompt, str) else list(prompt)})


class Events:
    """Feeds the lines of an event stream into an answer builder. `[DONE]` completes the answer."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._last: Mapping[str, Any] = {}
        self._usage: Mapping[str, Any] = {}

    def take(self, line: bytes) -> None:
        name, _, data = line.partition(b":")
        if name != b"data":  # a blank line, or a comment that keeps the connection alive
            return
        try:
            self._take(data.strip())
        except MALFORMED:
            raise BrokenStreamError(
                f"an event after {count(len(self._builder.tokens))} is not from TIDE Serve"
            ) from None

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._builder.complete(_answer(self._builder.tokens, self._last, self._usage))
            self._builder.end()
            return
        event = json.loads(data)
        if "error" in event:
            raise StatusError("ERROR", str(event["error"]["message"]), len(self._builder.tokens))
        self._builder.add([_token(token) for token in event.get("tide", {}).get("tokens", ())])
        if any(choice["finish_reason"] for choice in event["choices"]):
            self._last = event
        self._usage = event.get("usage") or self._usage


def num_layers_of(body: bytes) -> int:
    """Layers of the served model, from the list of models."""
    try:
        return int(json.loads(body)["data"][0]["tide"]["num_layers"])
    except MALFORMED:
        raise BrokenStreamError("the list of models is not from TIDE Serve") from None


def error_of(body: bytes) -> str:
    """The message of an error, or the first bytes of its body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except MALFORMED:
        return body[:200].decode(errors="replace")


def _bytes(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError as error:
        raise BadValueError(str(error)) from None


def _token(value: Mapping[str, Any]) -> Token:
    decided = value["exit_layer"], value["score"], value["audit"], value["mode"]
    return Token(value["id"], value["text"], *decided, gap=value.get("gap"))


def _answer(tokens: Sequence[Token], last: Mapping[str, Any], usage: Mapping[str, Any]) -> Answer:
    tide = last["tide"]
    return Answer(
        request_id=last["id"],
        text="".join(token.text for token in tokens),
        tokens=tuple(tokens),
        finish_reason=last["choices"][0]["finish_reason"],
        usage=Usage(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            0,
            tide["queue_s"],
            tide["first_token_s"],
            tide["total_s"],
        ),
        exits=ExitSummary(
            tide["layers_per_token"],
            tide["tokens_per_deep_pass"],
            tide["drafts"],
            tide["accepted"],
            {int(layer): count for layer, count in tide["tokens_per_layer"].items()},
            tide.get("differing", 0),
        ),
        artefact_digest=tide["artefact"],
        model=last["model"],
    )
