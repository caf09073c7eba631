"""Replies as plain records, and the builder that assembles an answer from its stream."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BrokenStreamError, TideClientError, count


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


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    """stop, length or abort."""
    usage: Usage
    exits: ExitSummary
    artefact_digest: str | None
    model: str


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
    epsilons: tuple[float, ...]
    artefact_digest: str | None
    modes: tuple[str, ...]
    default_mode: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    contract: str
    tokens: int
    disagreements: int
    rate: float
    lower: float
    upper: float
    epsilon: float | None
    delta: float
    broken: bool


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
    num_running: int
    num_waiting: int
    kv_usage: float
    artefact_digest: str | None


def token_of(message: pb.Token) -> Token:
    return Token(
        id=message.id,
        text=message.text,
        exit_layer=message.exit_layer,
        score=message.score if message.HasField("score") else None,
        audit=_name(AUDIT_NAMES, message.audit),
        mode=_name(MODE_NAMES, message.mode),
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.text, top.logprob) for top in message.top_logprobs),
    )


def answer_of(request_id: str, tokens: Sequence[Token], final: pb.Final) -> Answer:
    usage, exits = final.usage, final.exits
    return Answer(
        request_id=request_id,
        text="".join(token.text for token in tokens),
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
        ),
        artefact_digest=final.artefact_digest or None,
        model=final.model,
    )


def response_of(message: pb.GenerateResponse) -> Answer:
    if not message.HasField("final"):
        raise BrokenStreamError(f"the answer has {count(len(message.tokens))} and no final message")
    return answer_of(message.request_id, [token_of(token) for token in message.tokens], message.final)


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
        epsilons=tuple(message.epsilons),
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
                audit.tokens,
                audit.disagreements,
                audit.rate,
                audit.lower,
                audit.upper,
                audit.epsilon if audit.HasField("epsilon") else None,
                audit.delta,
                audit.broken,
            )
            for audit in message.audits
        ),
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


class AnswerBuilder:
    """Assembles one answer from a stream: tokens in order, then the complete answer or a failure. Tokens received
    before a failure are returned before it is raised; every later call raises it again."""

    def __init__(self) -> None:
        self.request_id = ""
        self.tokens: list[Token] = []
        self.is_over = False
        """No more tokens will arrive."""
        self._received: deque[Token] = deque()
        self._answer: Answer | None = None
        self._failure: TideClientError | None = None
        self._next_chunk = 0
        self._again: deque[Token] = deque()
        self._num_kept = 0

    @property
    def is_whole(self) -> bool:
        return self._answer is not None

    @property
    def answer(self) -> Answer:
        if self._failure is not None:
            raise self._failure
        if self._answer is None:
            raise TideClientError(
                f"there is no answer yet: {count(len(self.tokens))} received, the final message is missing"
            )
        return self._answer

    def next_token(self) -> Token | None:
        """The next received token; None if there is none yet. Raises the failure after all tokens."""
        if self._received:
            return self._received.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def take(self, chunk: pb.GenerateChunk) -> None:
        """Add a message of a gRPC stream; a missing or repeated chunk fails the stream."""
        if self.is_whole or chunk.sequence != self._next_chunk:
            expected = "nothing" if self.is_whole else str(self._next_chunk)
            self.fail(BrokenStreamError(f"chunk {chunk.sequence} came where {expected} was next"))
            return
        self._next_chunk += 1
        self.request_id = chunk.request_id
        tokens = [token_of(token) for token in chunk.tokens]
        while tokens and self._again:
            token, before = tokens.pop(0), self._again.popleft()
            if token.id != before.id:
                self.fail(BrokenStreamError(f"the resumed answer has token {token.id} where {before.id} was received"))
                return
        self.add(tokens)
        if chunk.HasField("final"):
            if self._again:
                self.fail(BrokenStreamError(f"the resumed answer ended {count(len(self._again))} early"))
                return
            self.complete(_joined(answer_of(chunk.request_id, self.tokens, chunk.final), self._num_kept))

    def add(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        self._received += tokens

    def complete(self, answer: Answer) -> None:
        """The final message arrived."""
        self._answer = answer

    def end(self) -> None:
        """The stream ended. Without a final message this is a failure."""
        if not self.is_whole:
            self.fail(BrokenStreamError(f"the stream ended after {count(len(self.tokens))} without a final message"))
        self.is_over = True

    def fail(self, failure: TideClientError) -> None:
        self._failure, self.is_over = failure, True

    def restart(self, num_kept: int) -> None:
        """Expect chunk 0 again, for a retried call whose prompt ends with the first `num_kept` tokens. The others must
        arrive again, and are not returned twice."""
        self._next_chunk, self._num_kept = 0, num_kept
        self._again = deque(self.tokens[num_kept:])


def _joined(answer: Answer, num_kept: int) -> Answer:
    """The answer with the tokens that the last attempt had in its prompt counted as what they are. Times, passes and
    drafts are those of the last attempt."""
    if num_kept == 0:
        return answer
    usage = replace(
        answer.usage,
        prompt_tokens=answer.usage.prompt_tokens - num_kept,
        completion_tokens=answer.usage.completion_tokens + num_kept,
    )
    per_layer = Counter(token.exit_layer for token in answer.tokens)
    return replace(answer, usage=usage, exits=replace(answer.exits, tokens_per_layer=dict(sorted(per_layer.items()))))
