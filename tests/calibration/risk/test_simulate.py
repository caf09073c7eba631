"""The replay of cycles: by hand, against a row that emits token by token, and against a plain walk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.calibration.risk.plain_walk import plain_walk
from tests.calibration.risk.traces_factory import made_traces, trace_of
from tide_core.calibration.risk.simulate import CycleCounts, acceptance_by_distance, pack, simulate_all
from tide_core.calibration.risk.traces import SequenceTrace
from tide_core.errors import ConfigError

INF = math.inf


def replayed(trace: SequenceTrace, **settings: Any) -> CycleCounts:
    return simulate_all(pack([trace]), **settings).total()


@dataclass
class Row:
    """A row of a toy engine: what it has emitted and what it waits for, token by token."""

    trace: SequenceTrace
    draft_threshold: float
    max_drafts: int
    exit_threshold: float
    emitted: list[str] = field(default_factory=list)
    deep_passes: int = 0
    drafts: int = 0

    def run(self) -> None:
        length = self.trace.agree.shape[1]
        while len(self.emitted) < length:
            pending = []
            while len(pending) < self.max_drafts and len(self.emitted) + len(pending) < length:
                distance, position = len(pending), len(self.emitted) + len(pending)
                score = float(self.trace.score[distance, position])
                if math.isnan(score) or score < self.draft_threshold:
                    break
                pending.append((bool(self.trace.agree[distance, position]), score >= self.exit_threshold))
            self.drafts += len(pending)
            self.deep_passes += 1
            for right, leaves in pending:
                if not right and not leaves:
                    break
                self.emitted.append(("exit" if leaves else "draft") + ("" if right else " wrong"))
            if len(self.emitted) < length:
                self.emitted.append("deep")


@pytest.mark.parametrize("exit_threshold", [INF, 0.95, 0.8, 0.0])
@pytest.mark.parametrize("draft_threshold", [-1.0, 0.0, 0.6, 0.9, 2.0])
@pytest.mark.parametrize("max_drafts", [0, 1, 4])
def test_the_walk_does_what_a_row_that_emits_token_by_token_does(
    draft_threshold: float, max_drafts: int, exit_threshold: float
) -> None:
    for trace in made_traces(6, 30, seed=1):
        trace.score[np.random.default_rng(0).random(trace.score.shape) < 0.05] = np.nan
        row = Row(trace, draft_threshold, max_drafts, exit_threshold)
        row.run()
        counts = replayed(trace, draft_threshold=draft_threshold, max_drafts=max_drafts, exit_threshold=exit_threshold)
        assert (counts.tokens, counts.deep_passes, counts.drafts) == (30, row.deep_passes, row.drafts)
        assert counts.accepted == sum(kind != "deep" for kind in row.emitted)
        assert counts.exits == sum(kind.startswith("exit") for kind in row.emitted)
        assert counts.disagreements == sum(kind.endswith("wrong") for kind in row.emitted)


@pytest.mark.parametrize("exit_threshold", [INF, 0.9, 0.5, -INF])
@pytest.mark.parametrize("draft_threshold", [-INF, 0.0, 0.55, 0.9, INF])
@pytest.mark.parametrize("max_drafts", [0, 1, 3, 4])
def test_many_sequences_at_once_give_what_each_gives_alone(
    draft_threshold: float, max_drafts: int, exit_threshold: float
) -> None:
    lengths = [0, 1, 2, 40, 0, *range(3, 30, 3), 0]
    traces = [made_traces(1, length, seed=i)[0] for i, length in enumerate(lengths)]
    for i, trace in enumerate(traces):
        trace.score[np.random.default_rng(i).random(trace.score.shape) < 0.1] = (np.nan, np.inf)[i % 2]
    settings = {"draft_threshold": draft_threshold, "max_drafts": max_drafts, "exit_threshold": exit_threshold}
    walks = simulate_all(pack(traces), **settings)
    alone = [plain_walk(trace, **settings) for trace in traces]
    for name in ("tokens", "deep_passes", "drafts", "accepted", "exits", "disagreements"):
        assert getattr(walks, name).tolist() == [getattr(counts, name) for counts in alone], name
    total = walks.total()
    for name in ("drafted_at", "refused_at", "accepted_at", "examined_at"):
        sums = np.array([getattr(counts, name) for counts in alone]).sum(0)
        assert getattr(total, name) == tuple(sums), name


def test_a_walk_by_hand() -> None:
    # Draft 0 and 1 are right, 2 is wrong: cycle 1 emits 0, 1 and the deep 2. Then 3 scores too little: deep alone.
    trace = trace_of(
        [[1, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]],
        [[0.9, 0.1, 0.1, 0.2, 0.9], [0.1, 0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.8, 0.1, 0.1]],
    )
    counts = replayed(trace, draft_threshold=0.5, max_drafts=3)
    assert counts == CycleCounts(
        tokens=5,
        deep_passes=3,
        drafts=4,
        accepted=3,
        exits=0,
        disagreements=0,
        drafted_at=(2, 1, 1),
        refused_at=(1, 0, 0),
        accepted_at=(2, 1, 0),
        examined_at=(2, 1, 1),
    )
    bounded = replayed(trace, draft_threshold=0.5, max_drafts=3, exit_threshold=0.75)
    assert (bounded.exits, bounded.disagreements, bounded.accepted, bounded.deep_passes) == (4, 1, 4, 2)


def test_a_score_that_is_no_number_never_drafts_and_never_exits() -> None:
    trace = trace_of([[1, 1, 1, 1]], [[math.nan, 1.0, 0.5, math.inf]])
    counts = replayed(trace, draft_threshold=-INF, max_drafts=1, exit_threshold=-INF)
    assert (counts.drafts, counts.exits, counts.deep_passes) == (1, 1, 3)


def test_scores_are_compared_without_rounding_the_threshold() -> None:
    score = float(np.float32(0.9))
    assert score < 0.9
    trace = trace_of([[1, 1]], [[score, score]])
    assert replayed(trace, draft_threshold=0.9, max_drafts=1).drafts == 0
    assert replayed(trace, draft_threshold=score, max_drafts=1).drafts == 1


def test_without_drafts_every_token_is_a_deep_pass() -> None:
    counts = simulate_all(pack(made_traces(3, 20)), draft_threshold=0.0, max_drafts=0).total()
    assert (counts.tokens, counts.deep_passes, counts.tokens_per_deep_pass) == (60, 60, 1.0)


def test_acceptance_is_of_drafts_whose_chain_was_right() -> None:
    # Both chains start at position 0 and 3: distance 1 is right twice, distance 2 once out of two.
    trace = trace_of([[1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]], [[0.9] * 6, [0.9] * 6])
    assert acceptance_by_distance(pack([trace]), 0.5, 2) == (2 / 3, 0.5)
    assert acceptance_by_distance(pack([trace]), 0.95, 2) == (0.0, 0.0)


@pytest.mark.parametrize("max_drafts", [-1, 5, True, 1.0])
def test_more_drafts_than_the_traces_know_are_refused(max_drafts: int) -> None:
    with pytest.raises(ConfigError, match=r"max_drafts: got .* expected an integer in 0\.\.4"):
        simulate_all(pack(made_traces(1, 5, 4)), draft_threshold=0.5, max_drafts=max_drafts)


def test_traces_of_different_distances_are_not_packed_together() -> None:
    with pytest.raises(ConfigError, match="same number of distances"):
        pack([*made_traces(1, 5, 4), *made_traces(1, 5, 3)])
    with pytest.raises(ConfigError, match="at least one trace"):
        pack([])
