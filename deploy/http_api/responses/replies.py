"""Replies of POST /v1/responses: items and events of one answer. No server here.

A whole response is the end of the stream: both are written by the same object.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.answer import Answer
from deploy.choices import Outputs
from deploy.failures import Failure, report
from deploy.http_api.openai_replies import TokenTexts
from deploy.http_api.reply_objects import logprob_object, sse_event, tide_object
from deploy.http_api.responses.requests import ResponseRequest
from deploy.tools.call_parser import CallDelta, Delta, ToolParser
from tide_core.request import FinishReason, RequestOutput, TokenOutput, Usage

Event = dict[str, Any]
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses, by HTTP status; the others are `server_error`."""
STATUSES = {FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


@dataclass(slots=True)
class ResponseReply:
    """Writes one answer as a response."""

    answer: Answer
    body: ResponseRequest
    model: str
    tokenizer: TokenTexts
    parser: ToolParser | None = None
    """Looks for tool calls in the answer."""
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False
    """Whether the last item may still grow."""
    _tokens: list[TokenOutput] = field(default_factory=list)
    _num_shown: int = 0
    """Tokens whose fields some event already has."""
    _num_events: int = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response with all of its items."""
        events = [event for output in outputs for event in self.events(output)]
        response: dict[str, Any] = events[-1]["response"]
        return response

    def first_events(self) -> list[Event]:
        """Events before the first token."""
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def events(self, output: RequestOutput) -> list[Event]:
        """The events of one output; those of the last one end with the whole response."""
        reason = output.finish_reason
        self._tokens += output.tokens
        text = "".join(token.text for token in output.tokens)
        deltas: list[Delta] = [text] if text else []
        if self.parser is not None:
            deltas = [*self.parser.feed(text), *(self.parser.finish() if reason is not None else ())]
        events = [event for delta in deltas for event in self._on_delta(delta)]
        if reason is None:
            return events
        status = STATUSES.get(reason, "completed")
        events += self._close("completed" if status == "completed" else "incomplete")
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=self._response(status, output))]

    def failed_events(self, failure: Failure) -> list[Event]:
        """The end of a stream that failed: what happened, and the response as far as it came."""
        error = {"code": ERROR_CODES.get(failure.status, "server_error"), "message": failure.message}
        what = self._event("error", code=failure.code, message=failure.message, param=failure.field)
        return [what, self._event("response.failed", response={**self._response("failed"), "error": error})]

    def _on_delta(self, delta: Delta) -> list[Event]:
        if isinstance(delta, str):
            events = [] if self._writes("message") else self._open_message()
            part, logprobs = self._items[-1]["content"][0], self._logprobs()
            part["text"] += delta
            part["logprobs"] += logprobs
            place = self._place(content_index=0)
            return [*events, self._delta("response.output_text.delta", delta, logprobs=logprobs, **place)]
        events = self._open_call(delta) if delta.id is not None else []
        if delta.arguments:
            self._items[-1]["arguments"] += delta.arguments
            kind = "response.function_call_arguments.delta"
            events.append(self._delta(kind, delta.arguments, **self._place()))
        return events

    def _writes(self, kind: str) -> bool:
        return self._is_open and self._items[-1]["type"] == kind

    def _open_message(self) -> list[Event]:
        item = {"type": "message", "role": "assistant", "content": []}
        events = [*self._close("completed"), self._open("msg", item)]
        self._items[-1]["content"] = [_text_part("")]
        place = self._place(content_index=0)
        return [*events, self._event("response.content_part.added", **place, part=_text_part(""))]

    def _open_call(self, delta: CallDelta) -> list[Event]:
        item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
        return [*self._close("completed"), self._open("fc", item)]

    def _open(self, prefix: str, item: dict[str, Any]) -> Event:
        item_id = f"{prefix}_{self.answer.engine_id}_{len(self._items)}"
        self._items.append({"id": item_id, "status": "in_progress", **item})
        self._is_open = True
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=dict(self._items[-1]))

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,), place = item["content"], self._place(content_index=0)
            events = [
                self._event("response.output_text.done", **place, **{key: part[key] for key in ("text", "logprobs")}),
                self._event("response.content_part.done", **place, part=part),
            ]
        else:
            kind, call = "response.function_call_arguments.done", {key: item[key] for key in ("name", "arguments")}
            events = [self._event(kind, **self._place(), **call)]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens that came since the event before."""
        if self.answer.params.logprobs is None:
            return []
        named = self.tokenizer.token_bytes
        return [
            {
                **logprob_object(named(token.token_id), token.logprob),
                "top_logprobs": [logprob_object(named(each), logprob) for each, logprob in token.top_logprobs],
            }
            for token in self._tokens[self._num_shown :]
        ]

    def _place(self, **more: int) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}

    def _delta(self, kind: str, delta: str, **more: Any) -> Event:
        """An event with text. It has the requested fields of the tokens that came since the one before."""
        event = self._event(kind, delta=delta, **more)
        tokens, self._num_shown = self._tokens[self._num_shown :], len(self._tokens)
        if tide := tide_object(self.body.options, self.answer, tokens):
            event["tide"] = tide
        return event

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str, last: RequestOutput | None = None) -> dict[str, Any]:
        """The response as it stands; `last`: the output that ended it."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        params = self.answer.params
        response = {
            "id": f"resp_{self.answer.engine_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.model,
            "output": list(self._items),
            "temperature": params.temperature,
            "top_p": params.top_p,
            **self.body.echo(),
            "usage": None if last is None or last.usage is None else self._usage(last.usage),
        }
        if last is not None and (tide := tide_object(self.body.options, self.answer, self._tokens, last.usage)):
            response["tide"] = tide
        return response

    def _usage(self, usage: Usage) -> dict[str, Any]:
        num_output = len(self._tokens)
        return {
            "input_tokens": usage.prompt_tokens,
            # What enters the prefix cache is not counted per request.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + num_output,
        }


async def response_events(
    reply: ResponseReply, first: tuple[int, RequestOutput], outputs: Outputs
) -> AsyncIterator[bytes]:
    """The answer as server-sent events with names. The last one has the whole response, complete or failed."""
    try:
        yield _joined([*reply.first_events(), *reply.events(first[1])])
        async for _, output in outputs:
            yield _joined(reply.events(output))
    except Exception as error:
        yield _joined(reply.failed_events(report(error)))


def _joined(events: Sequence[Event]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\n" + sse_event(event) for event in events)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
