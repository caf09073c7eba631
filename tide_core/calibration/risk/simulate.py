"""Replay of the engine's cycles on traces of agreement and score. Numpy only.

A trace holds, for every generated position and every distance to the last deep state, whether the exit's token is the
full-depth token and the router's score. So any draft threshold, draft length and exit threshold can be tried without
running a model:

    position    i        i+1      i+2      i+3
    distance    1        2        3        -
                draft    draft    refused            two drafts, then one deep pass over all pending tokens
                right    wrong                       one accepted; the deep pass itself gives the token at i+1

`simulate_all` replays many sequences at once: it computes for every position where a cycle that begins there would end,
then follows the cycles. The tests hold it against a plain walk over one sequence.

Traces are teacher-forced: after an exit that disagrees, the walk continues along the full-depth text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.risk.traces import SequenceTrace


@dataclass(frozen=True, slots=True)
class CycleCounts:
    """Counts of a replay. The tuples have one entry per distance, 1 first."""

    tokens: int
    deep_passes: int
    drafts: int
    accepted: int
    """Drafts that were emitted; with an exit threshold also those that disagree."""
    exits: int
    """Emitted drafts whose score reached the exit threshold."""
    disagreements: int
    drafted_at: tuple[int, ...]
    refused_at: tuple[int, ...]
    """Cycles whose drafting ended there with a score below the draft threshold: an exit head ran without a draft."""
    accepted_at: tuple[int, ...]
    examined_at: tuple[int, ...]
    """Drafts before which every draft of the cycle was emitted."""

    @property
    def tokens_per_deep_pass(self) -> float:
        return self.tokens / self.deep_passes if self.deep_passes else 0.0


@dataclass(frozen=True, slots=True)
class PackedTraces:
    """Many sequences end to end, P positions, arranged so that column p holds the drafts of a cycle that begins at p.

    Row m of a cycle that begins at p is the draft at position p + m and distance m + 1."""

    starts: NDArray[np.int64]
    """[N] first position of every sequence."""
    lengths: NDArray[np.int64]
    """[N]"""
    owner: NDArray[np.int64]
    """[P] sequence of every position."""
    remaining: NDArray[np.int64]
    """[P] positions left in the sequence, this one included."""
    score: NDArray[np.float32]
    """[J, P]; minus infinity where there is no usable score."""
    wrong: NDArray[np.bool_]
    """[J, P]"""
    least_score: NDArray[np.float32]
    """[J, P] lowest score of the drafts up to this one."""
    least_needed: NDArray[np.float32]
    """[J, P] lowest score of the wrong drafts up to this one, infinite where all are right."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_positions(self) -> int:
        return len(self.owner)

    @property
    def max_distance(self) -> int:
        return int(self.score.shape[0])


@dataclass(frozen=True, slots=True)
class Walks:
    """Counts of each of many sequences, [N]; the last four are per distance, [K]."""

    tokens: NDArray[np.int64]
    deep_passes: NDArray[np.int64]
    drafts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    exits: NDArray[np.int64]
    disagreements: NDArray[np.int64]
    drafted_at: NDArray[np.int64]
    refused_at: NDArray[np.int64]
    accepted_at: NDArray[np.int64]
    examined_at: NDArray[np.int64]

    def total(self) -> CycleCounts:
        """All sequences together."""
        sums = ("tokens", "deep_passes", "drafts", "accepted", "exits", "disagreements")
        lists = ("drafted_at", "refused_at", "accepted_at", "examined_at")
        values: dict[str, Any] = {name: int(getattr(self, name).sum()) for name in sums}
        values |= {name: tuple(int(count) for count in getattr(self, name)) for name in lists}
        return CycleCounts(**values)


def pack(sequences: Sequence[SequenceTrace]) -> PackedTraces:
    """Lay sequences of equal J end to end; empty ones count as sequences without tokens."""
    distances = {sequence.score.shape[0] for sequence in sequences}
    if len(distances) != 1:
        raise ConfigError("sequences", sorted(distances), "at least one trace, all of the same number of distances")
    num_rows = distances.pop()
    lengths = np.array([sequence.score.shape[1] for sequence in sequences], np.int64)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)[:-1]))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    remaining = (starts + lengths)[owner] - np.arange(len(owner))
    score = np.full((num_rows, len(owner)), -np.inf, np.float32)
    wrong = np.ones((num_rows, len(owner)), np.bool_)
    flat_score = np.concatenate([sequence.score for sequence in sequences], 1, dtype=np.float32)
    flat_wrong = ~np.concatenate([sequence.agree for sequence in sequences], 1).astype(np.bool_)
    flat_score = np.where(np.isfinite(flat_score), flat_score, np.float32(-np.inf))
    for row in range(num_rows):
        begins = np.flatnonzero(remaining > row)
        score[row, begins] = flat_score[row, begins + row]
        wrong[row, begins] = flat_wrong[row, begins + row]
    least_score = np.minimum.accumulate(score, 0)
    least_needed = np.minimum.accumulate(np.where(wrong, score, np.float32(np.inf)), 0)
    return PackedTraces(starts, lengths, owner, remaining, score, wrong, least_score, least_needed)


def simulate_all(
    traces: PackedTraces, *, draft_threshold: float, max_drafts: int, exit_threshold: float = math.inf
) -> Walks:
    """Replay every sequence; milliseconds for a hundred thousand positions. A score that is not a finite number neither
    drafts nor exits."""
    _check(max_drafts, traces.max_distance)
    draft, leave = _least(draft_threshold), _least(exit_threshold)
    usable = traces.least_score[:max_drafts] > -np.inf
    drafts = ((traces.least_score[:max_drafts] >= draft) & usable).sum(0)
    accepted = np.minimum(drafts, (traces.least_needed[:max_drafts] >= leave).sum(0))
    visited = _follow(traces, accepted)
    owner, drafts, accepted = traces.owner[visited], drafts[visited], accepted[visited]
    rows = np.arange(max_drafts)[:, None]
    emitted = rows < accepted
    exits = emitted & (traces.score[:max_drafts, visited] >= leave)
    disagreements = emitted & traces.wrong[:max_drafts, visited]
    limits = np.minimum(max_drafts, traces.remaining[visited])

    def per_sequence(counts: NDArray[Any]) -> NDArray[np.int64]:
        return np.bincount(owner, counts, traces.num_sequences).astype(np.int64)

    return Walks(
        tokens=traces.lengths,
        deep_passes=per_sequence(np.ones_like(owner)),
        drafts=per_sequence(drafts),
        accepted=per_sequence(accepted),
        exits=per_sequence(exits.sum(0)),
        disagreements=per_sequence(disagreements.sum(0)),
        drafted_at=(rows < drafts).sum(1),
        refused_at=((rows == drafts) & (rows < limits)).sum(1),
        accepted_at=emitted.sum(1),
        examined_at=((rows <= accepted) & (rows < drafts)).sum(1),
    )


def _follow(traces: PackedTraces, accepted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions at which a cycle begins, given how many drafts one that begins there would have accepted."""
    end = traces.num_positions
    step = accepted + 1
    after = np.where(step < traces.remaining, np.arange(end) + step, end)
    visited = np.zeros(end, np.bool_)
    at = traces.starts[traces.lengths > 0]
    while at.size:
        visited[at] = True
        at = after[at]
        at = at[at < end]
    return np.flatnonzero(visited)


def acceptance_by_distance(traces: PackedTraces, draft_threshold: float, max_drafts: int) -> tuple[float, ...]:
    """P(draft at distance j is right, given that it and all before it were drafted and those were right), j = 1 first.

    0 where no such draft was ever made."""
    walks = simulate_all(traces, draft_threshold=draft_threshold, max_drafts=max_drafts)
    pairs = zip(walks.accepted_at.tolist(), walks.examined_at.tolist(), strict=True)
    return tuple(accepted / examined if examined else 0.0 for accepted, examined in pairs)


def _least(threshold: float) -> np.float32:
    """The smallest float32 that is not below the threshold: like the engine, compare without rounding the threshold."""
    near = np.float32(threshold)
    return near if float(near) >= threshold else np.nextafter(near, np.float32(np.inf))


def _check(max_drafts: int, max_distance: int) -> None:
    if isinstance(max_drafts, bool) or not isinstance(max_drafts, int) or not 0 <= max_drafts <= max_distance:
        raise ConfigError("max_drafts", max_drafts, f"an integer in 0..{max_distance}, the distances of the traces")
