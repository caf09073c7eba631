"""Writes the outputs of the engine as messages of `tide.v1`: chunks of a stream, or a whole response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.answer import Answer
from deploy.grpc_api.messages import MODES
from deploy.tools.call_parser import Answer as ReadAnswer
from deploy.tools.call_parser import Delta, ToolParser
from tide.v1 import tide_pb2 as pb
from tide_core.request import Audit, RequestOutput, TokenOutput, Usage

if TYPE_CHECKING:
    from tide_core.outputs.tokenizer import Tokenizer

AUDITS = {
    Audit.VERIFIED: pb.AUDIT_VERIFIED,
    Audit.AGREED: pb.AUDIT_AGREED,
    Audit.DISAGREED: pb.AUDIT_DISAGREED,
    Audit.UNAUDITED: pb.AUDIT_UNAUDITED,
}
FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


@dataclass(slots=True)
class ChoiceReply:
    """Writes one answer."""

    answer: Answer
    model: str
    tokenizer: Tokenizer
    index: int = 0
    parser: ToolParser | None = None
    """Looks for tool calls in the answer."""

    def chunk(self, output: RequestOutput, sequence: int) -> pb.GenerateChunk:
        deltas = self._deltas([output])
        return pb.GenerateChunk(
            request_id=self.answer.request_id,
            sequence=sequence,
            tokens=[token_of(token, self.tokenizer) for token in output.tokens],
            final=self._final(output),
            choice=self.index,
            deltas=[delta_of(delta) for delta in deltas],
        )

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The fields that a response and its other choices have in common."""
        tokens = [token for output in outputs for token in output.tokens]
        read = ReadAnswer.of(self._deltas(outputs))
        return {
            "text": _text(tokens) if self.parser is None else read.content,
            "tokens": [token_of(token, self.tokenizer) for token in tokens],
            "final": self._final(outputs[-1]),
            "tool_calls": [pb.ToolCall(id=call["id"], **call["function"]) for call in read.calls],
        }

    def _deltas(self, outputs: Sequence[RequestOutput]) -> list[Delta]:
        """What the next outputs are certain to be, where calls are looked for."""
        if self.parser is None:
            return []
        fed = [delta for output in outputs for delta in self.parser.feed(_text(output.tokens))]
        return fed if outputs[-1].finish_reason is None else [*fed, *self.parser.finish()]

    def _final(self, output: RequestOutput) -> pb.Final | None:
        """The final message, if this output is the last. The parser must have read it: it knows of calls."""
        if output.finish_reason is None:
            return None
        reason, usage = output.finish_reason.value, output.usage or Usage(0, 0)
        return pb.Final(
            finish_reason=FINISH_REASONS[reason if self.parser is None else self.parser.finish_reason(reason)],
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
                differing=usage.num_differing,
                tokens_per_layer=dict(usage.exits),
            ),
            artefact_digest=self.answer.artefact or "",
            model=self.model,
        )


def response_of(choices: Sequence[ChoiceReply], outputs: Sequence[Sequence[RequestOutput]]) -> pb.GenerateResponse:
    """All choices in one message."""
    first, *others = [choice.whole(mine) for choice, mine in zip(choices, outputs, strict=True)]
    return pb.GenerateResponse(
        request_id=choices[0].answer.request_id,
        **first,
        other_choices=[pb.Choice(index=index, **fields) for index, fields in enumerate(others, start=1)],
    )


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
        gap=token.gap,
    )


def delta_of(delta: Delta) -> pb.Delta:
    if isinstance(delta, str):
        return pb.Delta(content=delta)
    piece = pb.ToolCallDelta(index=delta.index, id=delta.id or "", name=delta.name or "", arguments=delta.arguments)
    return pb.Delta(tool_call=piece)


def _text(tokens: Iterable[TokenOutput]) -> str:
    return "".join(token.text for token in tokens)
