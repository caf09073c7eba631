"""Learn-then-Test: p-values against brute force, and the promise against its own simulation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.calibration.risk.plain_walk import plain_walk
from tests.calibration.risk.traces_factory import made_traces
from tide_core.calibration.risk.certify import (
    RiskCurve,
    betting_p_value,
    certify_threshold,
    fewest_sequences,
    measure_risk,
    threshold_grid,
)
from tide_core.calibration.risk.simulate import pack
from tide_core.errors import ConfigError

DRAFTING = {"draft_threshold": 0.3, "max_drafts": 3}
GRID = tuple(round(0.99 - 0.03 * i, 2) for i in range(14))


# p-values


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5), (0.1, 0.4, 1.0), (0.2,)])
def test_p_values_are_never_too_small_at_the_edge_of_the_null(values: tuple[float, ...]) -> None:
    """All outcomes of six sequences whose expected loss is exactly epsilon, with their probabilities."""
    weights = np.full(len(values), 1.0 / len(values))
    epsilon = float(np.dot(values, weights))
    found = []
    for outcome in itertools.product(values, repeat=6):
        found.append((betting_p_value(np.array(outcome), epsilon), (1.0 / len(values)) ** 6))
    for level in (0.01, 0.05, 0.2, 0.5, 0.9):
        assert sum(weight for p, weight in found if p <= level) <= level + 1e-12


def test_betting_multiplies_the_capital_of_players_with_fixed_stakes() -> None:
    losses, epsilon = np.array([0.0, 0.3, 0.05]), 0.1
    stakes = [2.0**-k for k in range(7)]
    weights = [3.0**-k for k in range(7)]
    capital = [math.prod(1 + stake * (epsilon - loss) / (1 - epsilon) for loss in losses) for stake in stakes]
    expected = sum(w * c for w, c in zip(weights, capital, strict=True)) / sum(weights)
    assert betting_p_value(losses, epsilon) == pytest.approx(min(1.0, 1.0 / expected))
    assert betting_p_value(np.array([1.0]), 0.5) == 1.0


def test_betting_gains_from_a_small_spread_of_the_losses() -> None:
    losses = np.clip(np.random.default_rng(0).normal(0.008, 0.01, 2000), 0.0, 1.0)
    assert losses.mean() < 0.0095
    assert betting_p_value(losses, 0.01) < 0.25
    failures = np.zeros(2000)
    failures[: round(losses.sum())] = 1.0  # the same total with the largest spread
    assert betting_p_value(failures, 0.01) > 2 * betting_p_value(losses, 0.01)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.02, 0.05), (0.01, 0.1), (0.3, 0.01)])
def test_the_fewest_sequences_are_just_enough(epsilon: float, delta: float) -> None:
    needed = fewest_sequences(epsilon, delta)
    assert betting_p_value(np.zeros(needed), epsilon) <= delta
    assert betting_p_value(np.zeros(needed - 1), epsilon) > delta


# the threshold


def test_losses_are_disagreements_over_tokens_of_each_sequence() -> None:
    traces = made_traces(20, 30, spread=0.3)
    curve = measure_risk(pack(traces), **DRAFTING, grid=(0.9, 0.5))
    for g, threshold in enumerate((0.9, 0.5)):
        counts = [plain_walk(trace, **DRAFTING, exit_threshold=threshold) for trace in traces]
        assert curve.losses[g].tolist() == [c.disagreements / c.tokens for c in counts]
        assert curve.coverage[g] == sum(c.exits for c in counts) / sum(c.tokens for c in counts)


def test_the_grid_is_fixed_and_goes_from_strict_to_loose() -> None:
    grid = threshold_grid()
    assert grid == threshold_grid()
    assert list(grid) == sorted(grid, reverse=True)
    assert grid[0] > 0.9999
    assert grid[-1] < 0.05
    assert all(float(np.float32(threshold)) == threshold for threshold in grid)


def test_testing_stops_at_the_first_threshold_that_is_not_rejected() -> None:
    losses = np.zeros((4, 400))
    losses[1] = 0.5  # a strict threshold with a high risk ends the test, though looser ones have none
    curve = RiskCurve((0.9, 0.8, 0.7, 0.6), losses, (0.1, 0.2, 0.3, 0.4))
    result = certify_threshold(curve, 0.05, 0.05)
    assert (result.threshold, result.coverage, result.risk) == (0.9, 0.1, 0.0)
    assert result.p_value <= 0.05


def test_a_looser_promise_gives_a_looser_threshold() -> None:
    curve = measure_risk(pack(made_traces(600, 40)), **DRAFTING)
    results = [certify_threshold(curve, epsilon, 0.05) for epsilon in (0.02, 0.05, 0.1)]
    thresholds = [result.threshold for result in results]
    assert all(result.threshold is not None and result.risk <= result.epsilon for result in results)
    assert thresholds == sorted(thresholds, reverse=True)
    assert len(set(thresholds)) == 3
    assert results[0].coverage < results[1].coverage < results[2].coverage
    assert f"threshold {thresholds[1]:.4f}" in str(results[1])


def test_too_few_sequences_certify_nothing_and_the_message_names_the_number_needed() -> None:
    result = certify_threshold(measure_risk(pack(made_traces(60, 30)), **DRAFTING), 0.01, 0.05)
    assert result.threshold is None
    assert result.threshold is None
    needed = fewest_sequences(0.01, 0.05)
    assert f"mode bounded is refused; it takes at least {needed} held-out sequences, there are 60" in str(result)


def test_a_router_that_is_sure_and_wrong_certifies_nothing() -> None:
    traces = made_traces(400, 20)
    for trace in traces:
        trace.score[:] = np.float32(0.99999)
    result = certify_threshold(measure_risk(pack(traces), **DRAFTING), 0.02, 0.05)
    assert result.threshold is None
    assert "at the strictest one" in str(result)


def test_a_deliberately_optimistic_threshold_is_not_certified() -> None:
    traces = pack(made_traces(600, 40))
    certified = certify_threshold(measure_risk(traces, **DRAFTING), 0.05, 0.05)
    assert certified.threshold is not None
    again = certify_threshold(measure_risk(traces, **DRAFTING, grid=(certified.threshold,)), 0.05, 0.05)
    assert (again.threshold, again.p_value) == (certified.threshold, certified.p_value)
    assert certify_threshold(measure_risk(traces, **DRAFTING, grid=(0.5,)), 0.05, 0.05).threshold is None


@pytest.mark.parametrize("field", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, math.nan, True])
def test_promises_that_mean_nothing_are_refused(field: str, value: float) -> None:
    curve = RiskCurve((0.9,), np.zeros((1, 10)), (0.0,))
    with pytest.raises(ConfigError, match=f"{field}: got .* expected a number above 0 and below 1"):
        certify_threshold(curve, **{"epsilon": 0.1, "delta": 0.1, field: value})


def test_a_grid_that_is_not_from_strict_to_loose_is_refused() -> None:
    for grid in ((0.5, 0.9), (0.5, 0.5), ()):
        with pytest.raises(ConfigError, match="from strict to loose"):
            measure_risk(pack(made_traces(2, 5)), **DRAFTING, grid=grid)


# the promise

RUNS = 400
DELTA = 0.1


@functools.cache
def population() -> RiskCurve:
    """Losses of 8,000 sequences. They are the whole population: its mean losses are the true risks, without error."""
    return measure_risk(pack(made_traces(8_000, 12, 3, spread=0.3)), **DRAFTING, grid=GRID)


def share_of_broken_promises(
    everyone: RiskCurve, epsilon: float, rule: Callable[[RiskCurve], float | None], num: int
) -> tuple[float, float]:
    """How often a rule that sees a sample of `num` sequences takes a threshold with true risk above epsilon, and how
    often it takes any but the strictest."""
    true_risk = dict(zip(everyone.thresholds, everyone.risks, strict=True))
    random = np.random.default_rng(7)
    broken = loose = 0
    for _ in range(RUNS):
        drawn = random.integers(0, everyone.num_sequences, num)
        threshold = rule(dataclasses.replace(everyone, losses=everyone.losses[:, drawn]))
        broken += threshold is not None and true_risk[threshold] > epsilon
        loose += threshold is not None and threshold != everyone.thresholds[0]
    return broken / RUNS, loose / RUNS


def test_the_promise_is_broken_in_at_most_delta_of_all_calibrations() -> None:
    everyone = population()
    # The hardest case: epsilon lies just below the true risk of a threshold, so the next step is the false one.
    epsilon = everyone.risks[6] - 1e-9

    def tested(sample: RiskCurve) -> float | None:
        return certify_threshold(sample, epsilon, DELTA).threshold

    def optimistic(sample: RiskCurve) -> float | None:
        fitting = [t for t, risk in zip(sample.thresholds, sample.risks, strict=True) if risk <= epsilon]
        return fitting[-1] if fitting else None

    tolerance = 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / RUNS)
    broken, loose = share_of_broken_promises(everyone, epsilon, tested, 300)
    assert broken <= DELTA + tolerance
    assert loose > 0.9, "a test that never certifies anything keeps every promise"
    broken, _ = share_of_broken_promises(everyone, epsilon, optimistic, 300)
    assert broken > DELTA + tolerance, "the harness must notice a rule that breaks the promise"
