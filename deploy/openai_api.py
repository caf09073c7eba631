"""OpenAI's completion API: what may come in, what goes out, and how an error reads. No server here."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tide_core.errors import EngineBusyError, EngineDeadError, EngineError, RequestError
from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage

DEFAULT_MAX_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0
RETRY_AFTER_S = 1
MAX_SHOWN_ERRORS = 3
DONE_EVENT = b"data: [DONE]\n\n"


class _Strict(BaseModel):
    """No coercion, no unknown keys, no NaN: what came is what is run."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TideOptions(_Strict):
    """What only TIDE knows."""

    exit_layers: bool = False
    """Answer with the number of layers each token took."""


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class CompletionRequest(_Strict):
    """Body of POST /v1/completions. Defaults are OpenAI's; ranges are checked by `SamplingParams`."""

    model: str | None = None
    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_or_many)] = None
    stream: bool | None = None
    tide: TideOptions | None = None

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )

    @property
    def wants_exit_layers(self) -> bool:
        return self.tide is not None and self.tide.exit_layers


class ModelNotFoundError(Exception):
    """The client asked for a model that is not served here."""


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """What all objects of one answer have in common, and how to write them."""

    completion_id: str
    model: str
    with_exit_layers: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        tokens = [token for output in outputs for token in output.tokens]
        return self._object(tokens, outputs[-1])

    def chunk(self, output: RequestOutput) -> dict[str, Any]:
        """One piece of a streamed answer; the last one has the finish reason and the usage."""
        return self._object(output.tokens, output)

    def _object(self, tokens: Sequence[TokenOutput], last: RequestOutput) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": None,
            "finish_reason": None if last.finish_reason is None else last.finish_reason.value,
        }
        whole: dict[str, Any] = {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        if last.usage is not None:
            whole["usage"] = usage_object(last.usage)
        if self.with_exit_layers:
            whole["tide"] = {"exit_layers": [token.exit_layer for token in tokens]}
        return whole


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_list(model: str, created: int) -> dict[str, Any]:
    entry = {"id": model, "object": "model", "created": created, "owned_by": "tide"}
    return {"object": "list", "data": [entry]}


def sse_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON as written here has no line ends, so it is one line."""
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"


def raise_if_failed(output: RequestOutput) -> None:
    """An answer the engine broke off is an error, not an answer."""
    if output.error is not None:
        raise output.error
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError("the request failed")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineDeadError("the engine was closed")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as the client sees it: OpenAI's envelope."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is our fault, so that its cause must be logged."""
        return self.status >= 500


def error_reply(error: BaseException, error_id: str) -> ErrorReply:
    """By type, never by text. What is our fault gives away nothing but the id under which it was logged."""
    match error:
        case RequestError():
            return _reply(400, str(error), "invalid_request_error", "invalid_value", error.field)
        case ModelNotFoundError():
            return _reply(404, str(error), "invalid_request_error", "model_not_found", "model")
        case EngineBusyError():
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return _reply(429, "too many requests are waiting", "rate_limit_error", "engine_busy", headers=headers)
        case EngineDeadError():
            return _reply(503, f"the engine is not running (error {error_id})", "server_error", "engine_dead")
        case _:
            return _reply(500, f"internal error {error_id}", "server_error", "internal_error")


def validation_reply(errors: Sequence[Mapping[str, Any]]) -> ErrorReply:
    """400 for a body that does not fit the schema. Names fields and says what was expected; repeats no input."""
    named = [(_field_name(error["loc"]), str(error["msg"])) for error in errors]
    shown = "; ".join(f"{name or 'body'}: {message}" for name, message in named[:MAX_SHOWN_ERRORS])
    return _reply(400, shown, "invalid_request_error", "invalid_body", named[0][0])


def http_reply(status: int, detail: object, headers: Mapping[str, str] | None = None) -> ErrorReply:
    """The envelope for what the web framework refuses by itself: unknown paths, wrong methods, unreadable bodies."""
    return _reply(status, str(detail), "invalid_request_error", None, headers=dict(headers or {}))


def _field_name(loc: Sequence[str | int]) -> str | None:
    """`body.tide.exit_layers` is `tide.exit_layers`; a place in unreadable JSON is no field."""
    return ".".join(map(str, loc[1:])) if len(loc) > 1 and isinstance(loc[1], str) else None


def _reply(
    status: int,
    message: str,
    kind: str,
    code: str | None,
    param: str | None = None,
    *,
    headers: dict[str, str] | None = None,
) -> ErrorReply:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return ErrorReply(status, body, headers or {})
