"""Made-up traces: scores and agreement with a known relation."""

from __future__ import annotations

import numpy as np

from tide_core.calibration.risk.traces import CandidateTraces, SequenceTrace


def made_traces(
    num: int, length: int, distances: int = 4, *, seed: int = 0, skill: float = 0.8, spread: float = 0.0
) -> list[SequenceTrace]:
    """Sequences whose agreement is likelier where the score is high.

    `skill` is the mean score; a draft is right with the probability of its score, less an offset of its sequence:
    up to `spread`, the same for the whole sequence, so that tokens of one sequence are not independent."""
    random = np.random.default_rng(seed)
    odds = skill / (1.0 - skill)
    traces = []
    for _ in range(num):
        score = random.beta(2.0 * odds, 2.0, (distances, length))
        chance = np.clip(score - spread * random.random(), 0.0, 1.0)
        traces.append(SequenceTrace(random.random((distances, length)) < chance, score.astype(np.float32)))
    return traces


def made_candidate(name: str = "2:block", layer: int = 2, kind: str = "block", **settings: float) -> CandidateTraces:
    sizes = {"num": 40, "length": 50, "distances": 4, **settings}
    num, length, distances = (int(sizes.pop(key)) for key in ("num", "length", "distances"))
    seed = int(sizes.pop("seed", 0))
    return CandidateTraces(name, layer, kind, made_traces(num, length, distances, seed=seed, **sizes))


def trace_of(agree: list[list[int]], score: list[list[float]]) -> SequenceTrace:
    return SequenceTrace(np.array(agree, np.bool_), np.array(score, np.float32))
