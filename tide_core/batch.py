"""All that passes between scheduler, model runner and layers. No torch at run time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tide_core.request import NO_EXITS, Audit, ExitPolicy, PromptToken, Request

if TYPE_CHECKING:
    import torch

    from tide_core.kv.block_manager import BlockTable


FEW_QUERIES = 16
"""Tokens of a row in one pass that have the bits they would have one by one, on a GPU, too. With more of a row, Torch's
flash attention over gathered contexts is faster there; it adds up in another order."""


class RowStep(NamedTuple):
    """One row's share of a step: the tokens to run, and whether the next token is wanted. A tuple: one is made for
    every row of every step."""

    request: Request
    table: BlockTable
    """Read only here; its valid length is the position of the first token."""
    token_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens generated so far."""
    samples: bool
    policy: ExitPolicy = NO_EXITS
    num_drafts: int = 0
    """Most tokens the row may draft before its deep pass; its table has blocks for them."""
    suffix_drafts: Sequence[int] = ()
    """Suffix drafts, as many as `num_drafts`: these are its drafts, and no exit makes any."""
    num_differing: int = 0
    """How many of the tokens generated so far full depth would not have chosen, in mode bounded."""

    @property
    def start(self) -> int:
        return self.table.length

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and the prompt is not done. They need the states of all
        its tokens at full depth, which the plain path has. A prompt that runs again after output does not score."""
        return self.request.params.prompt_logprobs is not None and not self.output_ids

    @property
    def prompt_targets(self) -> range:
        """The tokens of the prompt whose log-probabilities a step that scores gives, by position: those after the
        tokens it runs, and the first of all, which has none. Of an answer that is judged, those of the answer."""
        start = self.table.length
        first = max(start + 1 if start else 0, self.request.scores_from or 0)
        return range(first, min(start + len(self.token_ids) + 1, len(self.request.prompt_ids)))


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Scheduler to runner: rows in arrival order."""

    rows: tuple[RowStep, ...]
    allows_lookahead: bool = False
    """Whether the rows have blocks for the next step too, so that a runner may launch it before this one is read."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenResult:
    """One token a row has gained."""

    token_id: int
    exit_layer: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    score: float | None = None
    audit: Audit = Audit.VERIFIED
    gap: float | None = None
    """Of a token that a budget kept."""


class DraftCounts(NamedTuple):
    """What drafting did for one row before one deep pass."""

    drafted: int = 0
    accepted: int = 0
    """How many of the drafts became output, from the first on."""
    non_finite: int = 0
    """Scores that were not finite; no token exits on them."""
    allowed: int = 0
    """Drafts that it could have made: those of the step it was launched with."""
    from_suffix: bool = False
    """Whether they were suffix drafts."""


NOTHING_DRAFTED = (DraftCounts(),)


class TokenNote(NamedTuple):
    """What most tokens do not have: log-probabilities, an audit other than verified, and the gap of a difference."""

    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    audit: Audit = Audit.VERIFIED
    gap: float | None = None


NO_NOTE = TokenNote()


class RowResult(NamedTuple):
    """Runner to scheduler, for one row: its new tokens, or the reason there are none. Without either, the row is still
    waiting for its result. Tokens are in columns, since most are never read one by one."""

    token_ids: tuple[int, ...] = ()
    exit_layers: tuple[int, ...] = ()
    scores: tuple[float | None, ...] = ()
    num_valid: int = 0
    """Tokens by which its valid length grows: those of the step and the accepted drafts."""
    layers_run: int = 0
    """Layers run for it, summed over its tokens of this step."""
    counts: tuple[DraftCounts, ...] = NOTHING_DRAFTED
    """Of each of its deep passes; a launch may hold several."""
    error: str | None = None
    notes: tuple[TokenNote, ...] = ()
    """Of each token; empty where all are `NO_NOTE`."""
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """Of a step that scores its prompt: one for each of `RowStep.prompt_targets`."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[TokenResult],
        num_valid: int,
        layers_run: int = 0,
        counts: tuple[DraftCounts, ...] = NOTHING_DRAFTED,
        error: str | None = None,
    ) -> RowResult:
        """From tokens made one by one."""
        notes = [TokenNote(token.logprob, token.top_logprobs, token.audit, token.gap) for token in tokens]
        return cls(
            tuple([token.token_id for token in tokens]),
            tuple([token.exit_layer for token in tokens]),
            tuple([token.score for token in tokens]),
            num_valid,
            layers_run,
            counts,
            error,
            () if all(note == NO_NOTE for note in notes) else tuple(notes),
        )

    @property
    def tokens(self) -> list[TokenResult]:
        """One by one."""
        notes = self.notes or [NO_NOTE] * len(self.token_ids)
        columns = self.token_ids, self.exit_layers, self.scores, notes
        return [
            TokenResult(token_id, exit_layer, note.logprob, note.top_logprobs, score, note.audit, note.gap)
            for token_id, exit_layer, score, note in zip(*columns, strict=True)
        ]

    @property
    def num_differing(self) -> int:
        """Tokens that a budget kept."""
        return sum([note.gap is not None for note in self.notes])

    def first(self, num: int) -> RowResult:
        """The first `num` tokens alone: valid length, passes and layers are reduced to theirs."""
        gained = list(accumulate([counts.accepted + 1 for counts in self.counts]))
        passes = bisect_left(gained, num) + 1
        return self._replace(
            counts=self.counts[:passes],
            layers_run=self.layers_run * min(passes, len(self.counts)) // len(self.counts),
            token_ids=self.token_ids[:num],
            exit_layers=self.exit_layers[:num],
            scores=self.scores[:num],
            notes=self.notes[:num],
            num_valid=self.num_valid - (len(self.token_ids) - num),
        )


NOT_READY = RowResult()


class StepTiming(NamedTuple):
    """How host and device shared a step whose successor was in flight before it was read."""

    wait_s: float
    """That the host waited for the device."""
    max_steps_per_launch: int
    """That such a launch may hold."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per row of the batch, in its order."""

    rows: tuple[RowResult, ...]
    timing: StepTiming | None = None
    """Known where all rows ran in one launch and the next one was in flight."""


class RunningStep(Protocol):
    """A step that was started. A device may work on it until `wait` returns."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What the core needs of a model runner."""

    def start(self, batch: ScheduledBatch) -> RunningStep:
        """Start a step. It must be waited for before the next one is started."""
        ...

    def lookahead_steps(self) -> int:
        """Steps that may be launched for a row before the result of the current one is read; 0 for none."""
        ...


class Rotation(NamedTuple):
    """How positions turn queries and keys: the rows of both tables [P, D] at `positions` [T], or one by one."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None


class KVWritten(Exception):
    """Raised by a view that is handed to a layer for the sake of its K and V alone, once they are written."""


class KVView(Protocol):
    """The KV cache as one step's layers see it: it takes the place of the library's cache and attention mask."""

    write_only: bool
    """Whether layers are to be left once K and V are written."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's K and V, [1, H, T, D] each; return what the attention of the layer is to be given."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of this step's queries, [1, H, T, D], over each row's own context; returns [1, T, H, Dv]."""
        ...
