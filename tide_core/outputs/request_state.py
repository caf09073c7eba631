"""What the core holds of a request besides its row, and how its tokens become outputs.

Ids and their number decide whether a text ends, unless the request has stop strings. So the text itself can wait until
the device is busy with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tide_core.batch import RowResult, RowStep, TokenResult
from tide_core.outputs.step_stats import StepStats, totals
from tide_core.outputs.tokenizer import TextStream
from tide_core.request import Audit, FinishReason, PromptToken, TokenOutput, Usage
from tide_core.row import Row


@dataclass(slots=True, eq=False)
class RequestState:
    """Text, times, and what the usage of a request is made of."""

    row: Row
    text: TextStream
    end_ids: frozenset[int]
    """Ids that end the text. They are not part of it unless the request includes what stops it."""
    arrived_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    steps: dict[StepStats, int] = field(default_factory=dict)
    """What its steps did, and how often."""
    ended_early: bool = False
    """True if the request ended before its last step was emitted; pending outputs are dropped."""
    prompt_logprobs: list[PromptToken] = field(default_factory=list)
    """Collected step by step, until the first output takes them."""

    def cut(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens there are up to the one that ends the text, and the reason, as far as ids and their
        number decide it."""
        left = self.row.request.params.max_tokens - len(self.row.output_ids)
        if len(token_ids) < left and self.end_ids.isdisjoint(token_ids):
            return len(token_ids), None
        for number, token_id in enumerate(token_ids, 1):
            if token_id in self.end_ids:
                return number, FinishReason.STOP
            if number == left:
                return number, FinishReason.LENGTH
        return len(token_ids), None

    def token_outputs(self, result: RowResult, mode: str) -> tuple[TokenOutput, ...]:
        """Tokens with their texts, of a text that goes on and has no stop strings."""
        texts = self.text.push_all(result.token_ids)
        if result.notes:
            noted = zip(result.token_ids, texts, result.exit_layers, result.scores, result.notes, strict=True)
            return tuple(
                [
                    TokenOutput(i, text, layer, note.logprob, note.top_logprobs, score, note.audit, mode, note.gap)
                    for i, text, layer, score, note in noted
                ]
            )
        verified = Audit.VERIFIED
        columns = zip(result.token_ids, texts, result.exit_layers, result.scores, strict=True)
        return tuple(
            [
                TokenOutput(token_id, text, layer, None, (), score, verified, mode)
                for token_id, text, layer, score in columns
            ]
        )

    def token_outputs_until_stop(
        self, tokens: Sequence[TokenResult], mode: str, ends: bool
    ) -> tuple[list[TokenOutput], bool]:
        """Tokens with the text that each releases, up to a stop string, and whether there is one. `ends`: the last
        token ends the text."""
        stream, last = self.text, len(tokens) - 1 if ends else -1
        silent_ids = frozenset() if self.row.request.params.include_stop_str_in_output else self.end_ids
        outputs: list[TokenOutput] = []
        for number, token in enumerate(tokens):
            token_id = token.token_id
            text = "" if token_id in silent_ids else stream.push(token_id)
            if number == last and not stream.stopped:
                text += stream.finish()  # text that was held; a stop string may be complete only now
            outputs.append(_output(token, text, mode))
            if stream.stopped:
                break
        return outputs, stream.stopped

    def add_prompt_logprobs(self, first: int, tokens: Sequence[PromptToken]) -> None:
        """Add those of one step, from the position `first` of the prompt on. A prompt that runs again after a
        preemption replaces what it gave before."""
        self.prompt_logprobs[first:] = tokens

    def take_prompt_logprobs(self) -> tuple[PromptToken, ...]:
        """What was collected, once."""
        if not self.prompt_logprobs:
            return ()
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def usage(self, now: float) -> Usage:
        row, sums = self.row, totals(self.steps)
        return Usage(
            prompt_tokens=len(row.request.prompt_ids),
            output_tokens=len(row.output_ids),
            cached_tokens=row.cached_tokens,
            num_preemptions=row.num_preemptions,
            layers_run=sums.layers_run,
            deep_passes=sums.deep_passes,
            num_drafts=sums.num_drafts,
            num_accepted=sums.num_accepted,
            num_differing=sums.num_differing,
            exits=sums.exits,
            queue_s=(now if self.started_at is None else self.started_at) - self.arrived_at,
            first_token_s=(now if self.first_token_at is None else self.first_token_at) - self.arrived_at,
            total_s=now - self.arrived_at,
        )


@dataclass(slots=True, eq=False)
class StepOutput:
    """What a step gave a request, pending until it is emitted; with a reason, the last of the request."""

    state: RequestState
    step: RowStep
    result: RowResult | None = None
    """None where there is an error instead."""
    tokens: list[TokenOutput] | None = None
    """Tokens with their texts, where stop strings needed them at commit."""
    reason: FinishReason | None = None
    error: Exception | None = None


def _output(token: TokenResult, text: str, mode: str) -> TokenOutput:
    columns = token.exit_layer, token.logprob, token.top_logprobs, token.score, token.audit
    return TokenOutput(token.token_id, text, *columns, mode, token.gap)
