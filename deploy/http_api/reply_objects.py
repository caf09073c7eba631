"""JSON objects that replies over HTTP share: tokens, exits, errors, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from deploy.answer import Answer
from deploy.failures import Failure
from deploy.http_api.openai_requests import TideOptions
from tide_core.request import TokenOutput, Usage
from tide_core.stats import EngineStats

DONE_EVENT = b"data: [DONE]\n\n"
MAX_SHOWN_ERRORS = 3
RULED_OUT = -9999.0


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that the model rules out has a number that stands for it."""
    return logprob if logprob is None or logprob > RULED_OUT else RULED_OUT


def token_name(raw: bytes) -> str:
    """How OpenAI writes a token: its text, or its bytes where they are a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def logprob_object(raw: bytes, logprob: float | None) -> dict[str, Any]:
    """A token and its log-probability, as chats and responses have it."""
    return {"token": token_name(raw), "logprob": logprob, "bytes": list(raw)}


def token_object(token: TokenOutput) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "text": token.text,
        "exit_layer": token.exit_layer,
        "score": token.score,
        "audit": token.audit.value,
        "gap": token.gap,
        "mode": token.mode,
    }


def tide_object(
    options: TideOptions, answer: Answer, tokens: Sequence[TokenOutput], usage: Usage | None = None
) -> dict[str, Any]:
    """The requested fields of each token, and with `usage` the totals of the answer."""
    tide: dict[str, Any] = {}
    if options.exit_layers:
        tide["exit_layers"] = [token.exit_layer for token in tokens]
    if options.tokens:
        tide["tokens"] = [token_object(token) for token in tokens]
    if usage is not None:
        tide |= {"mode": answer.params.mode, "artefact": answer.artefact, **exits_object(usage)}
    return tide


def exits_object(usage: Usage) -> dict[str, Any]:
    return {
        "layers_per_token": usage.layers_per_token,
        "tokens_per_deep_pass": usage.tokens_per_deep_pass,
        "drafts": usage.num_drafts,
        "accepted": usage.num_accepted,
        "differing": usage.num_differing,
        "tokens_per_layer": {str(layer): count for layer, count in sorted(usage.exits.items())},
        "queue_s": usage.queue_s,
        "first_token_s": usage.first_token_s,
        "total_s": usage.total_s,
    }


def stats_object(stats: EngineStats) -> dict[str, Any]:
    audits = [
        {
            "contract": audit.contract,
            "tenant": audit.tenant,
            "epsilon": audit.epsilon,
            "answers": audit.num_answers,
            "mean_loss": audit.mean_loss,
            "evidence": audit.evidence,
            "delta": audit.delta,
            "alarmed": audit.alarmed,
        }
        for audit in stats.audits
    ]
    return {
        **stats.exits,
        "contracts": audits,
        "answers_not_judged": stats.num_audits_dropped,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_usage": stats.kv_usage,
        "artefact": stats.artefact,
    }


def token_counts(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


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
    return str(error["msg"])


def _field_name(loc: Sequence[str | int]) -> str | None:
    """A path such as `messages.0.content`, without pydantic's names for the members of a union."""
    parts = [str(part) for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    return ".".join(parts) or None
