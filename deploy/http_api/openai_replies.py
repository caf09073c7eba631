"""Replies over HTTP: OpenAI's objects and events with TIDE's extra fields. No server here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.failures import Failure
from deploy.http_api.openai_requests import StreamOptions, TideOptions
from deploy.service import Answer
from tide_core.request import RequestOutput, TokenOutput, Usage

DONE_EVENT = b"data: [DONE]\n\n"
MAX_SHOWN_ERRORS = 3

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class CompletionReply:
    """Writes one answer as OpenAI objects."""

    answer: Answer
    model: str
    options: TideOptions
    decode: Decode
    usage_options: StreamOptions = field(default_factory=StreamOptions)
    """Whether the stream ends in a chunk with the usage; then every other chunk has `usage: null`, or the usage so
    far."""
    created: int = field(default_factory=lambda: int(time.time()))
    num_chars: int = 0
    """Characters of text written so far, for the offsets of completions."""
    num_tokens: int = 0
    """Tokens of a stream so far."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        tokens = [token for output in outputs for token in output.tokens]
        last = outputs[-1]
        reply = self._object(self.object_name, [self._whole_choice(tokens, _reason(last))])
        if last.usage is not None:
            reply["usage"] = usage_object(last.usage)
        return self._with_tide(reply, tokens, last)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks before the first token of a stream."""
        return []

    def chunk(self, output: RequestOutput) -> dict[str, Any]:
        """One chunk of a streamed answer; the last one has the finish reason."""
        reply = self._object(self.chunk_name, [self._chunk_choice(output.tokens, _reason(output))])
        self.num_tokens += len(output.tokens)
        return self._with_tide(self._with_usage(reply), output.tokens, output)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the usage so far, or null, to a chunk that is not the last."""
        options = self.usage_options
        if options.include_usage:
            counts = self.answer.num_prompt_tokens, self.num_tokens
            chunk["usage"] = token_counts(*counts) if options.continuous_usage_stats else None
        return chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._object(self.chunk_name, []), "usage": usage_object(usage)}

    def _whole_choice(self, tokens: Sequence[TokenOutput], reason: str | None) -> dict[str, Any]:
        return self._chunk_choice(tokens, reason)

    def _chunk_choice(self, tokens: Sequence[TokenOutput], reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": _text(tokens), "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenOutput]) -> dict[str, Any] | None:
        if self.answer.params.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self.num_chars)
            self.num_chars += len(token.text)
        return {
            "tokens": [self.decode([token.token_id]) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self.decode([token_id]): logprob for token_id, logprob in token.top_logprobs} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.answer.engine_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _with_tide(self, reply: dict[str, Any], tokens: Sequence[TokenOutput], output: RequestOutput) -> dict[str, Any]:
        """Add the requested fields of each token, and to the last chunk the totals of the answer."""
        tide: dict[str, Any] = {}
        if self.options.exit_layers:
            tide["exit_layers"] = [token.exit_layer for token in tokens]
        if self.options.tokens:
            tide["tokens"] = [token_object(token) for token in tokens]
        if output.finish_reason is not None and output.usage is not None:
            tide |= {"mode": self.answer.params.mode, "artefact": self.answer.artefact, **exits_object(output.usage)}
        if tide:
            reply["tide"] = tide
        return reply


class ChatReply(CompletionReply):
    """Writes one answer as OpenAI chat objects."""

    id_prefix = "chatcmpl"
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        reply = self._object(self.chunk_name, [choice])
        return [self._with_usage(reply)]

    def _whole_choice(self, tokens: Sequence[TokenOutput], reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": _text(tokens), "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _chunk_choice(self, tokens: Sequence[TokenOutput], reason: str | None) -> dict[str, Any]:
        text = _text(tokens)
        delta = {"content": text} if text or reason is None else {}
        return {"index": 0, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenOutput]) -> dict[str, Any] | None:
        if self.answer.params.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._logprob(token.token_id, token.logprob),
                    "top_logprobs": [self._logprob(*top) for top in token.top_logprobs],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _logprob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def token_object(token: TokenOutput) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "text": token.text,
        "exit_layer": token.exit_layer,
        "score": token.score,
        "audit": token.audit.value,
        "mode": token.mode,
    }


def exits_object(usage: Usage) -> dict[str, Any]:
    return {
        "layers_per_token": usage.layers_per_token,
        "tokens_per_deep_pass": usage.tokens_per_deep_pass,
        "drafts": usage.num_drafts,
        "accepted": usage.num_accepted,
        "tokens_per_layer": {str(layer): count for layer, count in sorted(usage.exits.items())},
        "queue_s": usage.queue_s,
        "first_token_s": usage.first_token_s,
        "total_s": usage.total_s,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    counts = token_counts(usage.prompt_tokens, usage.output_tokens)
    return {**counts, "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def token_counts(prompt: int | None, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt or 0, "completion_tokens": output, "total_tokens": (prompt or 0) + output}


def sse_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event. `json.dumps` writes no line ends, so it is one line."""
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"


def error_object(failure: Failure) -> dict[str, Any]:
    """A failure as OpenAI's error object."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.field,
            "code": failure.code,
        }
    }


def invalid_body(errors: Sequence[Mapping[str, Any]], unsupported: Container[str]) -> Failure:
    """The failure for a body that does not match its schema: fields and what was expected, without the input."""
    named = [(_field_name(error["loc"]), _message(error, unsupported)) for error in errors]
    shown = "; ".join(f"{name or 'body'}: {message}" for name, message in named[:MAX_SHOWN_ERRORS])
    code = "unsupported" if "not supported" in named[0][1] else "invalid_body"
    return Failure(400, "INVALID_ARGUMENT", "invalid_request_error", code, shown, named[0][0])


def _message(error: Mapping[str, Any], unsupported: Container[str]) -> str:
    if error["type"] == "extra_forbidden":
        return "this is not supported here" if error["loc"][-1] in unsupported else "no such field"
    if error["loc"][-1:] == ("n",):
        return "only n = 1 is supported"
    return str(error["msg"])


def _field_name(loc: Sequence[str | int]) -> str | None:
    """A path such as `messages.0.content`, without pydantic's names for the members of a union."""
    parts = [str(part) for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    return ".".join(parts) or None


def _reason(output: RequestOutput) -> str | None:
    return None if output.finish_reason is None else output.finish_reason.value


def _text(tokens: Sequence[TokenOutput]) -> str:
    return "".join(token.text for token in tokens)
