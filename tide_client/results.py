"""Replies as plain records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BrokenStreamError, count
from tide_client.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Token:
    """One token and how it was decided."""

    id: int
    text: str
    exit_layer: int
    """Layers that had run when it was decided."""
    score: float | None
    """Score of the router; None where no router ran."""
    audit: str
    """Comparison with full depth: verified, agreed, disagreed or unaudited."""
    mode: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, str, float], ...] = ()
    """Id, text and log-probability of the likeliest tokens at this position."""
    choice: int = 0
    """Number of the choice that it belongs to."""
    gap: float | None = None
    """Where bounded kept it though full depth would have chosen another: by how many nats that one was likelier."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer: of its content, or of a call of a tool."""

    choice: int
    content: str = ""
    call_index: int | None = None
    """Number of the call in the answer; None for content."""
    call_id: str | None = None
    """Of the first piece of a call, like its name."""
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_preemptions: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class ExitSummary:
    """Layers and passes that ran for the tokens of one answer."""

    layers_per_token: float
    tokens_per_deep_pass: float
    drafts: int
    accepted: int
    tokens_per_layer: Mapping[int, int]
    differing: int = 0
    """Tokens that full depth would not have chosen."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    text: str
    """The texts of all tokens; where tools may be called, what is not a call."""
    tokens: tuple[Token, ...]
    finish_reason: str
    """stop, length, abort or tool_calls."""
    usage: Usage
    exits: ExitSummary
    artefact_digest: str | None
    model: str
    tool_calls: tuple[ToolCall, ...] = ()
    others: tuple[Answer, ...] = ()
    """The choices after this one."""

    @property
    def choices(self) -> tuple[Answer, ...]:
        """All choices; this answer is the first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    max_tokens: int
    max_timeout_s: float
    dtype: str
    device: str
    version: str
    checkpoint_layers: tuple[int, ...]
    artefact_digest: str | None
    modes: tuple[str, ...]
    default_mode: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """How answers of mode fast compared with full depth, for one tenant and contract."""

    contract: str
    """fast(0.05); fast without a certified contract."""
    tenant: str
    """A hash of the key of those who asked; anyone without keys."""
    epsilon: float | None
    answers: int
    """Judged by full depth."""
    mean_loss: float
    """Mean share of an answer's tokens that full depth would have chosen otherwise; of one answer at most 0.5."""
    evidence: float
    """Against the contract; at 1/delta the alarm is raised."""
    delta: float
    alarmed: bool
    """Requests of this tenant for this contract are served as verified."""


@dataclass(frozen=True, slots=True)
class ExitStats:
    """Counts of a replica since it started."""

    total_tokens: int
    exited_tokens: int
    num_layers: int
    tokens_per_layer: Mapping[int, int]
    layers_per_token: float
    tokens_per_deep_pass: float
    drafts: int
    accepted: int
    non_finite_scores: int
    audits: tuple[AuditReport, ...]
    answers_not_judged: int
    """Answers of fast that were chosen to be judged and were not."""
    num_running: int
    num_waiting: int
    kv_usage: float
    artefact_digest: str | None


def token_of(message: pb.Token, choice: int = 0) -> Token:
    return Token(
        id=message.id,
        text=message.text,
        exit_layer=message.exit_layer,
        score=message.score if message.HasField("score") else None,
        audit=_name(AUDIT_NAMES, message.audit),
        mode=_name(MODE_NAMES, message.mode),
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.text, top.logprob) for top in message.top_logprobs),
        choice=choice,
        gap=message.gap if message.HasField("gap") else None,
    )


def answer_of(
    request_id: str, text: str, tokens: Sequence[Token], final: pb.Final, tool_calls: Sequence[ToolCall] = ()
) -> Answer:
    usage, exits = final.usage, final.exits
    return Answer(
        request_id=request_id,
        text=text,
        tokens=tuple(tokens),
        finish_reason=_name(FINISH_NAMES, final.finish_reason),
        usage=Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.num_preemptions,
            usage.queue_s,
            usage.first_token_s,
            usage.total_s,
        ),
        exits=ExitSummary(
            exits.layers_per_token,
            exits.tokens_per_deep_pass,
            exits.drafts,
            exits.accepted,
            dict(sorted(exits.tokens_per_layer.items())),
            exits.differing,
        ),
        artefact_digest=final.artefact_digest or None,
        model=final.model,
        tool_calls=tuple(tool_calls),
    )


def response_of(message: pb.GenerateResponse, n: int = 1) -> Answer:
    """The answer to a request for `n` choices."""
    others = [_choice(message.request_id, choice, choice.index) for choice in message.other_choices]
    if len(others) != n - 1:
        raise BrokenStreamError(f"the answer has {1 + len(others)} choices where {n} were asked for")
    return replace(_choice(message.request_id, message, 0), others=tuple(others))


def _choice(request_id: str, message: pb.GenerateResponse | pb.Choice, index: int) -> Answer:
    if not message.HasField("final"):
        raise BrokenStreamError(f"the answer has {count(len(message.tokens))} and no final message")
    tokens = [token_of(token, index) for token in message.tokens]
    calls = [ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
    return answer_of(request_id, message.text, tokens, message.final, calls)


def model_info_of(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        num_layers=message.num_layers,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        max_tokens=message.max_tokens,
        max_timeout_s=message.max_timeout_s,
        dtype=message.dtype,
        device=message.device,
        version=message.version,
        checkpoint_layers=tuple(message.checkpoint_layers),
        artefact_digest=message.artefact_digest or None,
        modes=tuple(_name(MODE_NAMES, mode) for mode in message.modes),
        default_mode=_name(MODE_NAMES, message.default_exits.mode),
    )


def exit_stats_of(message: pb.GetExitStatsResponse) -> ExitStats:
    return ExitStats(
        total_tokens=message.total_tokens,
        exited_tokens=message.exited_tokens,
        num_layers=message.num_layers,
        tokens_per_layer=dict(sorted(message.tokens_per_layer.items())),
        layers_per_token=message.layers_per_token,
        tokens_per_deep_pass=message.tokens_per_deep_pass,
        drafts=message.drafts,
        accepted=message.accepted,
        non_finite_scores=message.non_finite_scores,
        audits=tuple(
            AuditReport(
                audit.contract,
                audit.tenant,
                audit.epsilon if audit.HasField("epsilon") else None,
                audit.answers,
                audit.mean_loss,
                audit.evidence,
                audit.delta,
                audit.alarmed,
            )
            for audit in message.audits
        ),
        answers_not_judged=message.answers_not_judged,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        kv_usage=message.kv_usage,
        artefact_digest=message.artefact_digest or None,
    )


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Enum names without their prefix: `MODE_FULL` becomes full."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items()}


MODE_NAMES = _names(pb.Mode, "MODE_")
AUDIT_NAMES = _names(pb.Audit, "AUDIT_")
FINISH_NAMES = _names(pb.FinishReason, "FINISH_REASON_")


def _name(names: Mapping[int, str], number: int) -> str:
    """The name of an enum value; a newer server may send values that this client does not know."""
    return names.get(number) or f"unknown ({number})"
