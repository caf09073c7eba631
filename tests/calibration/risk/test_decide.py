"""The part that chooses is not the part that is stated."""

from __future__ import annotations

import numpy as np
import pytest

from tests.calibration.tiny_runs import tiny_calibration
from tide_core.calibration.risk.costs import CostModel
from tide_core.calibration.risk.decide import Decision, decide
from tide_core.calibration.risk.traces import CandidateTraces, SequenceTrace

LAYERS = 30


def traces(name: str, layer: int, right: float, *, num: int = 400, seed: int = 0) -> CandidateTraces:
    """Sequences of 20 tokens in which so many drafts are right, all of the same high score."""
    random = np.random.default_rng(seed)
    sequences = [SequenceTrace(random.random((3, 20)) < right, np.full((3, 20), 0.9, np.float32)) for _ in range(num)]
    return CandidateTraces(name, layer, "block", sequences)


def decided(
    test: list[CandidateTraces], calibration: list[CandidateTraces], given: list[CandidateTraces] | None = None
) -> Decision:
    costs = {each.name: CostModel(1e3 * each.layer, 1500.0, 1e3 * (LAYERS - each.layer) + 4000.0) for each in test}
    config = tiny_calibration(max_drafts=3)
    parts = {"test": test, "calibration": calibration}
    return decide(config, parts if given is None else {**parts, "given": given}, costs, LAYERS)


def test_the_test_part_chooses_whatever_the_calibration_part_would_rather_have() -> None:
    good, poor = traces("2", 2, 0.9), traces("5", 5, 0.5)

    decision = decided([good, poor], [traces("2", 2, 0.3, seed=1), traces("5", 5, 0.99, seed=1)])

    assert decision.best.name == "2"
    assert [plan.name for plan in decision.plans] == ["2", "5"]


def test_what_is_stated_is_measured_on_the_calibration_part() -> None:
    decision = decided([traces("2", 2, 0.99)], [traces("2", 2, 0.6, seed=1)])

    assert decision.acceptance[0] == pytest.approx(0.6, abs=0.03)
    assert decision.plans[0].counts != decision.best.counts
    assert decision.speedups[1] < decision.plans[0].speedup
    assert decision.fast is not None
    assert decision.fast.disagreement > 0.2  # chosen for at most .05 where drafts are right


@pytest.mark.parametrize(("own", "given"), [(0.99, 0.6), (0.6, 0.99)])
def test_fast_is_stated_as_it_is_on_the_part_where_more_tokens_disagree(own: float, given: float) -> None:
    decision = decided([traces("2", 2, 0.99)], [traces("2", 2, own, seed=1)], [traces("2", 2, given, num=300, seed=2)])

    assert decision.fast is not None
    assert decision.fast.disagreement > 0.2
    assert decision.fast.num_sequences == (300 if given < own else 400)
