"""Convert messages of `tide.v1` to calls, and outputs of the engine to messages. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deploy.service import Answer, Call
from tide.v1 import tide_pb2 as pb
from tide_core.errors import RequestError
from tide_core.request import Audit, FinishReason, Grammar, RequestOutput, TokenOutput, Usage
from tide_core.stats import EngineStats

if TYPE_CHECKING:
    from tide_core.engine.engine import Prompt
    from tide_core.outputs.tokenizer import Tokenizer

MODES = {"full": pb.MODE_FULL, "verified": pb.MODE_VERIFIED, "bounded": pb.MODE_BOUNDED, "fast": pb.MODE_FAST}
MODE_NAMES = {number: name for name, number in MODES.items()}
AUDITS = {
    Audit.VERIFIED: pb.AUDIT_VERIFIED,
    Audit.AGREED: pb.AUDIT_AGREED,
    Audit.DISAGREED: pb.AUDIT_DISAGREED,
    Audit.UNAUDITED: pb.AUDIT_UNAUDITED,
}
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
)


def call_of(request: pb.GenerateRequest) -> Call:
    """The call in a request; the service checks its values."""
    return Call(
        prompt=_prompt(request),
        params={**_sampling(request.sampling_params), **_exits(request.exits)},
        request_id=request.request_id or None,
        model=request.model or None,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    given = [name for name in ("prompt", "prompt_ids", "chat") if request.HasField(name)]
    if len(given) != 1:
        raise RequestError("prompt", ", ".join(given) or "nothing", "exactly one of prompt, prompt_ids and chat")
    if given == ["prompt"]:
        return request.prompt
    if given == ["prompt_ids"]:
        if not request.prompt_ids.ids:
            raise RequestError("prompt_ids", "no ids", "at least one token id")
        return list(request.prompt_ids.ids)
    return messages_of(request.chat)


def messages_of(chat: pb.Chat) -> list[dict[str, str]]:
    if not chat.messages:
        raise RequestError("chat.messages", "no messages", "at least one message")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    return values | {
        "logit_bias": dict(params.logit_bias),
        "stop": tuple(params.stop),
        "stop_ids": tuple(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "grammar": _grammar(params),
    }


def _grammar(params: pb.SamplingParams) -> Grammar | None:
    given = {name: getattr(params, name) for name in ("json_schema", "regex", "grammar") if params.HasField(name)}
    found = [Grammar(name, text, name) for name, text in given.items()]
    if params.choices:
        found.append(Grammar("choice", json.dumps(list(params.choices)), "choices"))
    if len(found) > 1:
        raise RequestError(found[0].field, found[1].field, "only one way to structure the output")
    return found[0] if found else None


def _exits(exits: pb.ExitParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(exits, name) for name in ("epsilon", "threshold", "min_layers") if exits.HasField(name)
    }
    if exits.mode != pb.MODE_UNSPECIFIED:
        if exits.mode not in MODE_NAMES:
            raise RequestError("mode", exits.mode, f"one of {', '.join(pb.Mode.keys())}")
        values["mode"] = MODE_NAMES[exits.mode]
    return values


def token_of(token: TokenOutput, tokenizer: Tokenizer) -> pb.Token:
    return pb.Token(
        id=token.token_id,
        text=token.text,
        exit_layer=token.exit_layer,
        score=token.score,
        audit=AUDITS[token.audit],
        logprob=token.logprob,
        top_logprobs=[
            pb.TopLogprob(token_id=token_id, text=tokenizer.decode([token_id]), logprob=logprob)
            for token_id, logprob in token.top_logprobs
        ],
        mode=MODES[token.mode],
    )


def chunk_of(
    answer: Answer, output: RequestOutput, sequence: int, *, model: str, tokenizer: Tokenizer
) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        request_id=answer.request_id,
        sequence=sequence,
        tokens=[token_of(token, tokenizer) for token in output.tokens],
        final=final_of(answer, output, model),
    )


def response_of(
    answer: Answer, outputs: Sequence[RequestOutput], *, model: str, tokenizer: Tokenizer
) -> pb.GenerateResponse:
    tokens = [token for output in outputs for token in output.tokens]
    return pb.GenerateResponse(
        request_id=answer.request_id,
        text="".join(token.text for token in tokens),
        tokens=[token_of(token, tokenizer) for token in tokens],
        final=final_of(answer, outputs[-1], model),
    )


def final_of(answer: Answer, output: RequestOutput, model: str) -> pb.Final | None:
    """The final message, if this output is the last."""
    if output.finish_reason is None:
        return None
    usage = output.usage or Usage(0, 0)
    return pb.Final(
        finish_reason=FINISH_REASONS[output.finish_reason],
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            num_preemptions=usage.num_preemptions,
            queue_s=usage.queue_s,
            first_token_s=usage.first_token_s,
            total_s=usage.total_s,
        ),
        exits=pb.ExitSummary(
            layers_per_token=usage.layers_per_token,
            tokens_per_deep_pass=usage.tokens_per_deep_pass,
            drafts=usage.num_drafts,
            accepted=usage.num_accepted,
            tokens_per_layer=dict(usage.exits),
        ),
        artefact_digest=answer.artefact or "",
        model=model,
    )


def stats_of(stats: EngineStats) -> pb.GetExitStatsResponse:
    exits = stats.exits
    layers = {int(layer): count for layer, count in exits["exits_per_layer"].items()}
    return pb.GetExitStatsResponse(
        total_tokens=exits["total_tokens"],
        exited_tokens=exits["total_exited"],
        num_layers=exits["num_layers"],
        tokens_per_layer={**layers, exits["num_layers"]: exits["remaining_tokens"]},
        layers_per_token=exits["layers_per_token"],
        tokens_per_deep_pass=exits["tokens_per_deep_pass"],
        drafts=exits["drafts"],
        accepted=exits["accepted"],
        non_finite_scores=exits["non_finite_scores"],
        audits=[
            pb.AuditReport(
                contract=contract,
                tokens=audit.num_tokens,
                disagreements=audit.num_disagreements,
                rate=audit.rate,
                lower=audit.lower,
                upper=audit.upper,
                epsilon=audit.epsilon,
                delta=audit.delta,
                broken=audit.broken,
            )
            for contract, audit in stats.audits.items()
        ],
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        artefact_digest=stats.artefact or "",
    )
