"""The part that chooses is not the part that certifies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.calibration.tiny_runs import tiny_calibration
from tide_core.calibration.risk.certify import Certification, strictest
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
    config = tiny_calibration(max_drafts=3, epsilons=(0.05,))
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


@pytest.mark.parametrize(("right", "certified"), [(0.99, True), (0.6, False)])
def test_a_bound_is_certified_by_the_calibration_part_alone(right: float, certified: bool) -> None:
    decision = decided([traces("2", 2, 0.99)], [traces("2", 2, right, seed=1)])

    [result] = decision.certifications
    assert result.num_sequences == 400
    assert (result.threshold is not None and result.coverage > 0.1) == certified


@pytest.mark.parametrize(("own", "given", "certified"), [(0.99, 0.6, False), (0.6, 0.99, False), (0.99, 0.99, True)])
def test_a_bound_must_hold_on_prompts_that_people_wrote_as_well(own: float, given: float, certified: bool) -> None:
    decision = decided([traces("2", 2, 0.99)], [traces("2", 2, own, seed=1)], [traces("2", 2, given, num=300, seed=2)])

    [result] = decision.certifications
    assert (result.threshold is not None and result.coverage > 0.1) == certified


def test_of_two_certified_thresholds_the_stricter_one_is_taken_with_its_own_numbers() -> None:
    loose, strict = (Certification(0.02, 0.05, threshold, 9, 0.01, 0.4, 0.03) for threshold in (0.8, 0.9))
    none = Certification(0.02, 0.05, None, 9, 0.01, 0.4, 0.3)

    assert strictest([loose, strict]) is strict
    assert strictest([strict, loose]) is strict
    assert strictest([none, strict]) is none
