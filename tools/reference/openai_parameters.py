"""Generate the tables of request parameters: what each OpenAI endpoint does with each parameter.

OpenAI's parameters are those of the installed `openai` package; what happens to them is read from the bodies in
`deploy/http_api`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from deploy.http_api.ignored_fields import Body
from deploy.http_api.openai_requests import ChatRequest, CompletionRequest
from deploy.http_api.responses.requests import ResponseRequest
from tools.reference.markdown import code, table

BEGIN, END = "<!-- parameters: python tools/reference_docs.py -->", "<!-- end of the parameters -->"
TAKEN, IGNORED, REFUSED, UNKNOWN = "taken", "ignored", "refused", "–"

CHECKED_ONLY = {(ResponseRequest, "stream_options")}
"""Fields of a body that change nothing once they are checked."""
NOTES = {
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "include": "`message.output_text.logprobs`; others are ignored",
    "input": "text, or items: messages, function calls and their results",
    "logprobs": "chats: true or false; completions: up to 20",
    "max_completion_tokens": "goes before `max_tokens`",
    "max_output_tokens": "goes before `max_tokens`",
    "messages": "text; roles system, developer, user, assistant, tool",
    "metadata": "responses repeat it",
    "moderation": "there is no filter",
    "n": "choices of each prompt; a response has one",
    "parallel_tool_calls": "`false`: one call at most",
    "prompt": "completions: text, ids, or a list of either",
    "prompt_logprobs": "up to 20, not streamed; only the likeliest tokens have a rank",
    "response_format": "`text`, `json_object`, `json_schema`",
    "stop": "up to 16",
    "structured_outputs": "one of json, regex, choice, grammar, json_object",
    "store": "nothing is stored",
    "stream_options": "`include_usage`, `continuous_usage_stats`; a streamed response always ends with its usage",
    "text": "`format`; `verbosity` is ignored",
    "tide": "`mode`, `epsilon`, `margin`, `threshold`, `min_layers`, `timeout_s`, `exit_layers`, `tokens`; no others",
    "tools": "of type function",
    "top_logprobs": "up to 20, with the token's bytes; responses: where they are included",
    "top_k": "`-1` or `0`: all",
    "truncate_prompt_tokens": "keeps the end; `-1`: what leaves place for the answer",
    "truncation": "a prompt that does not fit is refused",
}


class Endpoint(NamedTuple):
    title: str
    body: type[Body]
    params: Any
    """Module of the `openai` package with the endpoint's create params."""

    @property
    def names(self) -> frozenset[str]:
        """OpenAI's parameters."""
        kinds = ("Base", "NonStreaming", "Streaming")
        stem = "ResponseCreateParams" if self.body is ResponseRequest else "CompletionCreateParams"
        return frozenset(name for kind in kinds for name in getattr(self.params, stem + kind).__annotations__)

    @property
    def known(self) -> frozenset[str]:
        """Names that the body does anything with."""
        fields = {field.alias or name for name, field in self.body.model_fields.items()}
        return frozenset(fields | self.body.unread | self.body.neutral.keys() | self.body.unsupported)


ENDPOINTS = (
    Endpoint("chats", ChatRequest, chat_create_params),
    Endpoint("completions", CompletionRequest, completion_create_params),
    Endpoint("responses", ResponseRequest, response_create_params),
)


def group(body: type[Body], name: str) -> str:
    """The one group that a parameter of a body is in; UNKNOWN if the body does not know it."""
    fields = {field.alias or field_name: field for field_name, field in body.model_fields.items()}
    if name in fields:
        if (body, name) in CHECKED_ONLY:
            return IGNORED
        return TAKEN if only_values(fields[name].annotation) is None else REFUSED
    if name in body.unread:
        return IGNORED
    return REFUSED if name in body.neutral or name in body.unsupported else UNKNOWN


def allowed_values(body: type[Body], name: str) -> tuple[Any, ...]:
    """Values of a refused parameter that are ignored instead."""
    if name in body.neutral:
        return tuple(body.neutral[name])
    field = body.model_fields.get(name)
    return () if field is None else only_values(field.annotation) or ()


def only_values(annotation: Any) -> tuple[Any, ...] | None:
    """The values of a field that may have one value at most, beside null; None for any other field."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    values: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            values += get_args(kind)
        elif kind is not type(None):
            return None
    return tuple(values) if len(values) <= 1 else None


def parameters() -> str:
    """One table of OpenAI's parameters, one of the others that are known here."""
    theirs = frozenset().union(*(endpoint.names for endpoint in ENDPOINTS))
    known = frozenset().union(*(endpoint.known for endpoint in ENDPOINTS))
    head = ("parameter", *(endpoint.title for endpoint in ENDPOINTS), "")
    return "\n\n".join(
        [
            table(head, map(_row, sorted(theirs))),
            "Parameters of vLLM and other servers, and TIDE's own:",
            table(head, map(_row, sorted(known - theirs))),
        ]
    )


def _row(name: str) -> tuple[str, ...]:
    groups = [group(endpoint.body, name) for endpoint in ENDPOINTS]
    for endpoint, found in zip(ENDPOINTS, groups, strict=True):
        if found == UNKNOWN and name in endpoint.names:
            raise SystemExit(f"{name}: {endpoint.body.__name__} neither takes nor names this parameter of OpenAI's")
    return code(name), *groups, "; ".join(_notes(name))


def _notes(name: str) -> Iterator[str]:
    known = [endpoint for endpoint in ENDPOINTS if name in endpoint.known]
    for endpoint in known:
        if values := allowed_values(endpoint.body, name):
            where = f" in {endpoint.title}" if len(known) > 1 else ""
            yield f"{' or '.join(code(json.dumps(value)) for value in values)} is ignored{where}"
    if name in NOTES:
        yield NOTES[name]
