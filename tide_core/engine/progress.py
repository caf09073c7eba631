"""What the core keeps of a request beside its row, and how its tokens become outputs.

Whether a text ends can be told from ids and their number, unless the request has stop strings. So the text itself can
wait until the device is busy with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tide_core.batch import RowResult, RowStep, TokenResult
from tide_core.engine.row import Row
from tide_core.engine.tokenizer import TextStream
from tide_core.quick import quick
from tide_core.request import Audit, FinishReason, RequestOutput, TokenOutput, Usage

make_token, make_output = quick(TokenOutput), quick(RequestOutput)


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
    exits: dict[int, int] = field(default_factory=dict)
    """Output tokens by exit layer."""
    layers_run: int = 0
    deep_passes: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    is_over: bool = False
    """Whether its last word was said before its time: what is still to be said of it is not."""

    def cut(self, tokens: Sequence[TokenResult]) -> tuple[Sequence[TokenResult], FinishReason | None]:
        """The tokens up to the one that ends the text, and why it does, as far as ids and their number tell."""
        left = self.row.request.params.max_tokens - len(self.row.output_ids)
        for place, token in enumerate(tokens, 1):
            if token.token_id in self.end_ids:
                return tokens[:place], FinishReason.STOP
            if place == left:
                return tokens[:place], FinishReason.LENGTH
        return tokens, None

    def count(self, exits: Sequence[tuple[int, Audit]], layers_run: int, drafted: int, accepted: int) -> None:
        """Add what one step gave: exit layers of its tokens, and what ran for them."""
        mine = self.exits
        for layer, _ in exits:
            mine[layer] = mine.get(layer, 0) + 1
        self.layers_run += layers_run
        self.deep_passes += 1
        self.num_drafts += drafted
        self.num_accepted += accepted

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
            said.append(
                make_token(
                    token_id,
                    text,
                    token.exit_layer,
                    token.logprob,
                    token.top_logprobs,
                    token.score,
                    token.audit,
                    mode,
                )
            )
            if stream.stopped:
                break
        return said, stream.stopped

    def usage(self, now: float) -> Usage:
        row = self.row
        return Usage(
            prompt_tokens=len(row.request.prompt_ids),
            output_tokens=len(row.output_ids),
            cached_tokens=row.cached_tokens,
            num_preemptions=row.num_preemptions,
            layers_run=self.layers_run,
            deep_passes=self.deep_passes,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            exits=self.exits,
            queue_s=(now if self.started_at is None else self.started_at) - self.arrived_at,
            first_token_s=(now if self.first_token_at is None else self.first_token_at) - self.arrived_at,
            total_s=now - self.arrived_at,
        )


@dataclass(slots=True, eq=False)
class Gain:
    """What a step has given a request, to be said; with a reason, the last there is."""

    progress: Progress
    mode: str
    tokens: Sequence[TokenResult] = ()
    said: list[TokenOutput] | None = None
    """The tokens with their texts, where these were needed at once."""
    reason: FinishReason | None = None
    error: Exception | None = None
    ran: tuple[RowStep, RowResult] | None = None
    """What it came from, where that is still to be counted."""
