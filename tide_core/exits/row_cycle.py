"""One row in one cycle: its tokens, how deep each has run, and the states at the checkpoints.

A cycle is one engine step: tokens are drafted in the shallow segment, then one deep pass catches up with all that is
pending. Between cycles nothing is pending, so all of this lives for one step only. Tokens are counted from the first
one of the step; token t stands at position `start + t` of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tide_core.batch import RowStep
from tide_core.kv.cache import RowSpan
from tide_core.sampling.rows import SamplingRow

Range = tuple[int, int]
"""Tokens of a row from the first up to, not including, the second."""
FROM_SUFFIX = -1
"""In place of a draft's checkpoint: it is a suffix draft."""


@dataclass(slots=True)
class Draft:
    """A token proposed at a checkpoint; or a suffix draft."""

    token_id: int
    checkpoint: int
    score: float | None
    probabilities: torch.Tensor | None = None
    """The distribution it was sampled from, [V] float64; None when greedy, and for a suffix draft, which is certain."""
    logits: torch.Tensor | None = None
    """Of the exit, [V]; kept for log-probabilities of tokens no deep layer sees."""


@dataclass(slots=True, eq=False)
class RowCycle:
    """What happens to one row between schedule and commit."""

    step: RowStep
    tokens: list[int]
    ran: list[int]
    """Tokens that are done with each segment: run through it, or skipped with their K and V written."""
    pieces: list[list[tuple[int, torch.Tensor]]]
    """States after each segment: (first token, [n, D]), ascending."""
    drafts: list[Draft] = field(default_factory=list)
    last_score: float | None = None
    """Of the token that no draft follows, where a router scored it."""
    left_at: dict[int, int] = field(default_factory=dict)
    """Tokens that skip all segments after an exit, by its index."""
    codes: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of these tokens, [1, r] each: what the skip map of their exit makes of them; none where there is no skip map."""
    features: torch.Tensor | None = None
    """Of the newest token at the last exit it was asked at, [1, D]; in mode fast, where the next exit needs them."""
    tapped: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    """States at the taps as in `pieces`, by tap; only in steps with rows in mode fast."""
    headed: list[int] = field(default_factory=list)
    """Tokens that the head of each checkpoint has run on."""
    layers_run: int = 0
    non_finite: int = 0
    stopped: bool = False
    """No more drafts in this cycle."""

    @classmethod
    def begin(cls, step: RowStep, num_segments: int) -> RowCycle:
        zeros = [0] * num_segments
        row = cls(step, list(step.token_ids), list(zeros), [[] for _ in zeros], headed=list(zeros))
        if step.suffix_drafts:
            row.tokens += step.suffix_drafts
            row.drafts = [Draft(token_id, FROM_SUFFIX, None) for token_id in step.suffix_drafts]
            row.stopped = True
        return row

    @property
    def has_suffix_drafts(self) -> bool:
        """Whether its drafts are suffix drafts."""
        return bool(self.step.suffix_drafts)

    @property
    def tracked(self) -> bool:
        """Whether its exit state is written."""
        return self.step.policy.may_exit

    def missing(self, segment: int) -> Range:
        return self.ran[segment], len(self.tokens)

    def running(self, segment: int) -> list[Range]:
        """The tokens that still have to run through a segment, in unbroken ranges."""
        first, stop = self.missing(segment)
        if not self.left_at:
            return [(first, stop)] if first < stop else []
        return list(_ranges(t for t in range(first, stop) if not self.skips(t, segment)))

    def skipping(self, segment: int) -> list[Range]:
        """The tokens that skip a segment and whose K and V are not written yet."""
        first, stop = self.missing(segment)
        return list(_ranges(t for t in range(first, stop) if self.skips(t, segment))) if self.left_at else []

    def skips(self, token: int, segment: int) -> bool:
        return token in self.left_at and segment > self.left_at[token]

    def span(self, tokens: Range) -> RowSpan:
        first, stop = tokens
        return RowSpan(self.step.table.block_ids, self.step.start + first, stop - first)

    def take(self, segment: int, tokens: Range) -> list[torch.Tensor]:
        """The states of these tokens after a segment, in order, as views."""
        return _taken(self.pieces[segment], tokens)

    def take_tapped(self, tap: int, tokens: Range) -> list[torch.Tensor]:
        """The states of these tokens at a tap, in order, as views."""
        return _taken(self.tapped[tap], tokens)

    def sampling_row(self, token: int, *, stream: int = 0, distance: int = 0) -> SamplingRow:
        """The sampler's input to choose the token after token t of the step; `distance`: of a draft."""
        step = self.step
        output_ids: Sequence[int] = step.output_ids
        if self.drafts and token > 0:
            output_ids = [*step.output_ids, *(draft.token_id for draft in self.drafts[:token])]
        request = step.request
        ids = request.prompt_ids, output_ids, request.eos_ids
        return SamplingRow(request.params, request.seed, *ids, stream, distance, request.mask)

    def deep_slot(self, block_size: int) -> int:
        """The slot of the last token before this step; 0 if there is none."""
        last = max(self.step.start - 1, 0)
        return self.step.table.block_ids[last // block_size] * block_size + last % block_size

    def deep_sources(self, tokens: Range, last_segment: int) -> tuple[np.ndarray, np.ndarray]:
        """For each token the position of the last one before it that ran deep, and how far back that is (0: none)."""
        positions = np.arange(self.step.start + tokens[0], self.step.start + tokens[1])
        sources = np.empty_like(positions)
        deep = self.step.start - 1
        for token in range(tokens[1]):
            if token >= tokens[0]:
                sources[token - tokens[0]] = deep
            if not self.skips(token, last_segment):
                deep = self.step.start + token
        return np.maximum(sources, 0), np.where(sources >= 0, positions - sources, 0)

    def slots(self, positions: np.ndarray, block_size: int) -> np.ndarray:
        """The slots of positions of the row."""
        blocks = np.asarray(self.step.table.block_ids, dtype=np.int64)
        slots: np.ndarray = blocks[positions // block_size] * block_size + positions % block_size
        return slots


def _taken(pieces: list[tuple[int, torch.Tensor]], tokens: Range) -> list[torch.Tensor]:
    first, stop = tokens
    taken = []
    for begin, states in pieces:
        low, high = max(first, begin), min(stop, begin + len(states))
        if low < high:
            taken.append(states[low - begin : high - begin])
    return taken


Part = tuple[RowCycle, Range]
"""Some tokens of one row."""


def _ranges(tokens: Iterator[int]) -> Iterator[Range]:
    """Ascending numbers as unbroken ranges."""
    first = stop = -1
    for token in tokens:
        if token != stop:
            if first >= 0:
                yield first, stop
            first = token
        stop = token + 1
    if first >= 0:
        yield first, stop
