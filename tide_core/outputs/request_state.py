"""What the core keeps of a request beside its row, and how its tokens become outputs.

Whether a text ends can be told from ids and their number, unless the request has stop strings. So the text itself can
wait until the device is busy with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from tide_core.batch import RowResult, RowStep, TokenResult
from tide_core.outputs.step_stats import Did, sums
from tide_core.outputs.tokenizer import TextStream
from tide_core.quick import quick
from tide_core.request import Audit, FinishReason, RequestOutput, TokenOutput, Usage
from tide_core.row import Row

make_token, make_output = quick(TokenOutput), quick(RequestOutput)
NO_LOGPROBS, NO_TOP_LOGPROBS, VERIFIED = repeat(None), repeat(()), repeat(Audit.VERIFIED)
"""Columns of tokens of which there is nothing to note."""


@dataclass(slots=True, eq=False)
class Progress:
    """Text, times, and what the usage of a request will say."""

    row: Row
    text: TextStream
    end_ids: frozenset[int]
    """Ids that end the text and are no part of it."""
    arrived_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    entries: dict[Did, int] = field(default_factory=dict)
    """What it did in its steps."""
    is_over: bool = False
    """Whether its last word was said before its time: what is still to be said of it is not."""

    def cut(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens there are up to the one that ends the text, and why it does, as far as ids and their
        number tell."""
        left = self.row.request.params.max_tokens - len(self.row.output_ids)
        if len(token_ids) < left and self.end_ids.isdisjoint(token_ids):
            return len(token_ids), None
        for place, token_id in enumerate(token_ids, 1):
            if token_id in self.end_ids:
                return place, FinishReason.STOP
            if place == left:
                return place, FinishReason.LENGTH
        return len(token_ids), None

    def say_on(self, result: RowResult, mode: str) -> tuple[TokenOutput, ...]:
        """What `say` comes to where the text goes on and has no stop strings."""
        token_ids = result.token_ids
        texts = self.text.push_all(token_ids)
        if result.notes:
            return tuple([_output(token, text, mode) for token, text in zip(result.tokens, texts, strict=True)])
        about = result.exit_layers, NO_LOGPROBS, NO_TOP_LOGPROBS, result.scores, VERIFIED, repeat(mode)
        return tuple(map(make_token, token_ids, texts, *about))

    def say(self, tokens: Sequence[TokenResult], mode: str, ends: bool) -> tuple[list[TokenOutput], bool]:
        """Tokens with the text that each releases, up to a stop string; and whether there is one. `ends`: the last one
        ends the text."""
        stream, end_ids, last = self.text, self.end_ids, len(tokens) - 1 if ends else -1
        said: list[TokenOutput] = []
        for place, token in enumerate(tokens):
            token_id = token.token_id
            text = "" if token_id in end_ids else stream.push(token_id)
            if place == last and not stream.stopped:
                text += stream.finish()  # what was held back; a stop string may be complete only now
            said.append(_output(token, text, mode))
            if stream.stopped:
                break
        return said, stream.stopped

    def usage(self, now: float) -> Usage:
        row, did = self.row, sums(self.entries)
        return Usage(
            prompt_tokens=len(row.request.prompt_ids),
            output_tokens=len(row.output_ids),
            cached_tokens=row.cached_tokens,
            num_preemptions=row.num_preemptions,
            layers_run=did.layers_run,
            deep_passes=did.deep_passes,
            num_drafts=did.num_drafts,
            num_accepted=did.num_accepted,
            exits=did.exits,
            queue_s=(now if self.started_at is None else self.started_at) - self.arrived_at,
            first_token_s=(now if self.first_token_at is None else self.first_token_at) - self.arrived_at,
            total_s=now - self.arrived_at,
        )


@dataclass(slots=True, eq=False)
class Gain:
    """What a step has given a request, to be said; with a reason, the last there is."""

    progress: Progress
    step: RowStep
    result: RowResult | None = None
    """None where there is an error instead."""
    said: list[TokenOutput] | None = None
    """The tokens with their texts, where these were needed at once."""
    reason: FinishReason | None = None
    error: Exception | None = None
    is_counted: bool = True


def _output(token: TokenResult, text: str, mode: str) -> TokenOutput:
    about = token.exit_layer, token.logprob, token.top_logprobs, token.score, token.audit
    return make_token(token.token_id, text, *about, mode)
