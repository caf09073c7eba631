"""The reference for `simulate_all`: the cycles of one sequence, one draft after another."""

from __future__ import annotations

import math

from tide_core.calibration.risk.simulate import CycleCounts
from tide_core.calibration.risk.traces import SequenceTrace


def plain_walk(
    sequence: SequenceTrace, *, draft_threshold: float, max_drafts: int, exit_threshold: float = math.inf
) -> CycleCounts:
    def reaches(distance: int, position: int, threshold: float) -> bool:
        score = float(sequence.score[distance, position])
        return math.isfinite(score) and score >= threshold

    length = sequence.agree.shape[1]
    drafted_at, refused_at, accepted_at, examined_at = ([0] * max_drafts for _ in range(4))
    deep_passes = exits = disagreements = start = 0
    while start < length:
        drafts = 0
        while drafts < max_drafts and start + drafts < length:
            if not reaches(drafts, start + drafts, draft_threshold):
                refused_at[drafts] += 1
                break
            drafted_at[drafts] += 1
            drafts += 1
        accepted = 0
        while accepted < drafts:
            examined_at[accepted] += 1
            right = bool(sequence.agree[accepted, start + accepted])
            exited = reaches(accepted, start + accepted, exit_threshold)
            if not right and not exited:
                break
            exits += exited
            disagreements += not right
            accepted_at[accepted] += 1
            accepted += 1
        deep_passes += 1
        start += accepted + 1
    return CycleCounts(
        tokens=length,
        deep_passes=deep_passes,
        drafts=sum(drafted_at),
        accepted=sum(accepted_at),
        exits=exits,
        disagreements=disagreements,
        drafted_at=tuple(drafted_at),
        refused_at=tuple(refused_at),
        accepted_at=tuple(accepted_at),
        examined_at=tuple(examined_at),
    )
