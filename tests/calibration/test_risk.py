"""Learn-then-Test: p-values against brute force, and the promise against its own simulation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.calibration.traces_factory import made_traces
from tide_core.calibration.risk.p_values import (
    betting_p_value,
    binomial_cdf,
    binomial_p_value,
    fewest_sequences,
    hoeffding_bentkus_p_value,
    p_value,
)
from tide_core.calibration.risk.risk import (
    RiskCurve,
    choose_threshold,
    choose_thresholds,
    risk_curve,
    threshold_grid,
    verify_choice,
)
from tide_core.calibration.risk.simulate import pack, simulate
from tide_core.errors import ConfigError

DRAFTING = {"draft_threshold": 0.3, "max_drafts": 3}
GRID = tuple(round(0.99 - 0.03 * i, 2) for i in range(14))


# p-values


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (7, 0.02), (30, 0.3), (200, 0.01), (150, 0.97)])
def test_the_binomial_tail_is_the_sum_of_its_terms(n: int, p: float) -> None:
    terms = [math.comb(n, i) * p**i * (1.0 - p) ** (n - i) for i in range(n + 1)]
    for k in range(-1, n + 2):
        assert binomial_cdf(k, n, p) == pytest.approx(math.fsum(terms[: k + 1]), rel=1e-10, abs=1e-300)


@pytest.mark.parametrize(("n", "p"), [(10**6, 0.001), (10**6, 0.37), (10**5, 0.02)])
def test_the_binomial_tail_holds_for_a_million_trials(n: int, p: float) -> None:
    mean, deviation = n * p, math.sqrt(n * p * (1.0 - p))
    for k in (round(mean + z * deviation) for z in (-30, -6, -2, 0, 2, 6)):
        i = np.arange(max(k - 20 * round(deviation), 0), k + 1)
        steps = np.log((n - i[1:] + 1) * p / (i[1:] * (1.0 - p)))  # log of each term over the one before
        first = math.lgamma(n + 1) - math.lgamma(i[0] + 1) - math.lgamma(n - i[0] + 1)
        first += i[0] * math.log(p) + (n - i[0]) * math.log1p(-p)
        logs = first + np.concatenate(([0.0], np.cumsum(steps)))
        brute = math.exp(logs.max()) * math.fsum(np.exp(logs - logs.max()))
        assert binomial_cdf(k, n, p) == pytest.approx(brute, rel=1e-6)


def test_a_binomial_p_value_is_never_too_small_and_is_exact() -> None:
    n, epsilon = 60, 0.1
    probabilities = [math.comb(n, k) * epsilon**k * (1.0 - epsilon) ** (n - k) for k in range(n + 1)]
    p_values = [binomial_p_value(k, n, epsilon) for k in range(n + 1)]
    for k in range(n + 1):
        reached = sum(q for q, p in zip(probabilities, p_values, strict=True) if p <= p_values[k])
        assert reached == pytest.approx(p_values[k], rel=1e-9)


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5), (0.1, 0.4, 1.0), (0.2,)])
@pytest.mark.parametrize("test", ["hoeffding-bentkus", "betting"])
def test_p_values_for_rates_are_never_too_small_at_the_edge_of_the_null(test: str, values: tuple[float, ...]) -> None:
    """All outcomes of six sequences whose expected loss is exactly epsilon, with their probabilities."""
    weights = np.full(len(values), 1.0 / len(values))
    epsilon = float(np.dot(values, weights))
    found = []
    for outcome in itertools.product(values, repeat=6):
        found.append((p_value(np.array(outcome), epsilon, test), (1.0 / len(values)) ** 6))
    for level in (0.01, 0.05, 0.2, 0.5, 0.9):
        assert sum(weight for p, weight in found if p <= level) <= level + 1e-12


def test_hoeffding_bentkus_is_the_smaller_of_the_two_bounds() -> None:
    n, epsilon, total = 500, 0.05, 10.4
    mean = total / n
    entropy = mean * math.log(mean / epsilon) + (1 - mean) * math.log((1 - mean) / (1 - epsilon))
    bentkus = math.e * sum(math.comb(n, k) * epsilon**k * (1 - epsilon) ** (n - k) for k in range(12))
    assert hoeffding_bentkus_p_value(total, n, epsilon) == pytest.approx(min(math.exp(-n * entropy), bentkus))
    assert hoeffding_bentkus_p_value(0.0, n, epsilon) == pytest.approx((1 - epsilon) ** n)
    assert hoeffding_bentkus_p_value(n * epsilon, n, epsilon) == 1.0
    assert hoeffding_bentkus_p_value(float(n), n, epsilon) == 1.0


def test_betting_multiplies_the_capital_of_players_with_fixed_stakes() -> None:
    losses, epsilon = np.array([0.0, 0.3, 0.05]), 0.1
    stakes = [2.0**-k for k in range(7)]
    weights = [3.0**-k for k in range(7)]
    capital = [math.prod(1 + stake * (epsilon - loss) / (1 - epsilon) for loss in losses) for stake in stakes]
    expected = sum(w * c for w, c in zip(weights, capital, strict=True)) / sum(weights)
    assert betting_p_value(losses, epsilon) == pytest.approx(min(1.0, 1.0 / expected))
    assert betting_p_value(np.array([1.0]), 0.5) == 1.0


def test_betting_gains_from_a_small_spread_where_the_total_alone_says_little() -> None:
    losses = np.clip(np.random.default_rng(0).normal(0.008, 0.01, 2000), 0.0, 1.0)
    assert losses.mean() < 0.0095
    assert betting_p_value(losses, 0.01) < 0.25
    assert hoeffding_bentkus_p_value(math.fsum(losses), 2000, 0.01) > 2 * betting_p_value(losses, 0.01)


@pytest.mark.parametrize("test", ["betting", "hoeffding-bentkus", "binomial"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.02, 0.05), (0.01, 0.1), (0.3, 0.01)])
def test_the_fewest_sequences_are_just_enough(epsilon: float, delta: float, test: str) -> None:
    needed = fewest_sequences(epsilon, delta, test)
    assert p_value(np.zeros(needed), epsilon, test) <= delta
    assert p_value(np.zeros(needed - 1), epsilon, test) > delta


def test_the_binomial_test_refuses_losses_between_0_and_1() -> None:
    with pytest.raises(ConfigError, match="losses other than 0 and 1"):
        p_value(np.array([0.0, 0.5]), 0.1, "binomial")
    with pytest.raises(ConfigError, match="one of betting, hoeffding-bentkus, binomial"):
        p_value(np.array([0.0]), 0.1, "t-test")


# the choice


def test_losses_are_disagreements_over_tokens_of_each_sequence() -> None:
    traces = made_traces(20, 30, spread=0.3)
    curve = risk_curve(pack(traces), **DRAFTING, grid=(0.9, 0.5))
    anything = risk_curve(pack(traces), **DRAFTING, grid=(0.9, 0.5), loss="any")
    for g, threshold in enumerate((0.9, 0.5)):
        counts = [simulate(trace, **DRAFTING, exit_threshold=threshold) for trace in traces]
        assert curve.losses[g].tolist() == [c.disagreements / c.tokens for c in counts]
        assert anything.losses[g].tolist() == [float(c.disagreements > 0) for c in counts]
        assert curve.coverage[g] == sum(c.exits for c in counts) / sum(c.tokens for c in counts)
    assert (curve.test, anything.test) == ("betting", "binomial")


def test_the_grid_is_fixed_and_goes_from_strict_to_loose() -> None:
    grid = threshold_grid()
    assert grid == threshold_grid()
    assert list(grid) == sorted(grid, reverse=True)
    assert grid[0] > 0.9999
    assert grid[-1] < 0.05
    assert all(float(np.float32(threshold)) == threshold for threshold in grid)


def test_testing_stops_at_the_first_threshold_that_is_not_rejected() -> None:
    losses = np.zeros((4, 400))
    losses[1] = 0.5  # a strict threshold with a bad risk ends the test, though looser ones look well
    curve = RiskCurve((0.9, 0.8, 0.7, 0.6), losses, (0.1, 0.2, 0.3, 0.4))
    choice = choose_threshold(curve, 0.05, 0.05)
    assert (choice.threshold, choice.coverage, choice.risk) == (0.9, 0.1, 0.0)
    assert choice.p_value <= 0.05


def test_a_looser_promise_gives_a_looser_threshold() -> None:
    curve = risk_curve(pack(made_traces(600, 40)), **DRAFTING)
    choices = choose_thresholds(curve, (0.02, 0.05, 0.1), 0.05)
    thresholds = [choice.threshold for choice in choices]
    assert all(choice.certified and choice.risk <= choice.epsilon for choice in choices)
    assert thresholds == sorted(thresholds, reverse=True)
    assert len(set(thresholds)) == 3
    assert choices[0].coverage < choices[1].coverage < choices[2].coverage
    assert f"threshold {thresholds[1]:.4f}" in str(choices[1])


def test_too_few_sequences_certify_nothing_and_say_how_many_it_takes() -> None:
    choice = choose_threshold(risk_curve(pack(made_traces(60, 30)), **DRAFTING), 0.01, 0.05)
    assert not choice.certified
    assert choice.threshold is None
    needed = fewest_sequences(0.01, 0.05, "betting")
    assert f"mode bounded is refused; it takes at least {needed} held-out sequences, there are 60" in str(choice)


def test_a_router_that_is_sure_and_wrong_certifies_nothing() -> None:
    traces = made_traces(400, 20)
    for trace in traces:
        trace.score[:] = np.float32(0.99999)
    choice = choose_threshold(risk_curve(pack(traces), **DRAFTING), 0.02, 0.05)
    assert choice.threshold is None
    assert "at the strictest one" in str(choice)


def test_a_deliberately_optimistic_threshold_is_refused() -> None:
    traces = pack(made_traces(600, 40))
    choice = choose_threshold(risk_curve(traces, **DRAFTING), 0.05, 0.05)
    assert choice.threshold is not None
    settings = {"epsilon": 0.05, "delta": 0.05, **DRAFTING}
    assert verify_choice(traces, threshold=choice.threshold, **settings) == choice.p_value
    with pytest.raises(ConfigError, match=r"threshold: got 0.5, expected .* at most 0.05; on 600 sequences it is 1,"):
        verify_choice(traces, threshold=0.5, **settings)


@pytest.mark.parametrize("field", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, math.nan, True])
def test_promises_that_mean_nothing_are_refused(field: str, value: float) -> None:
    curve = RiskCurve((0.9,), np.zeros((1, 10)), (0.0,))
    with pytest.raises(ConfigError, match=f"{field}: got .* expected a number above 0 and below 1"):
        choose_threshold(curve, **{"epsilon": 0.1, "delta": 0.1, field: value})


def test_a_grid_that_is_not_from_strict_to_loose_is_refused() -> None:
    for grid in ((0.5, 0.9), (0.5, 0.5), ()):
        with pytest.raises(ConfigError, match="from strict to loose"):
            risk_curve(pack(made_traces(2, 5)), **DRAFTING, grid=grid)
    with pytest.raises(ConfigError, match="binomial for the loss `any` only"):
        risk_curve(pack(made_traces(2, 5)), **DRAFTING, test="binomial")


# the promise

RUNS = 400
DELTA = 0.1


@functools.cache
def population(loss: str) -> RiskCurve:
    """Losses of 8,000 sequences. They are the whole population: its mean losses are the true risks, without error."""
    return risk_curve(pack(made_traces(8_000, 12, 3, spread=0.3)), **DRAFTING, grid=GRID, loss=loss)


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


@pytest.mark.parametrize(
    ("loss", "test"), [("rate", "betting"), ("rate", "hoeffding-bentkus"), ("any", "binomial"), ("any", "betting")]
)
def test_the_promise_is_broken_in_at_most_delta_of_all_calibrations(loss: str, test: str) -> None:
    everyone = dataclasses.replace(population(loss), test=test)
    # The hardest case: epsilon lies just below the true risk of a threshold, so the next step is the false one.
    epsilon = everyone.risks[6] - 1e-9

    def tested(sample: RiskCurve) -> float | None:
        return choose_threshold(sample, epsilon, DELTA).threshold

    def optimistic(sample: RiskCurve) -> float | None:
        fitting = [t for t, risk in zip(sample.thresholds, sample.risks, strict=True) if risk <= epsilon]
        return fitting[-1] if fitting else None

    tolerance = 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / RUNS)
    broken, loose = share_of_broken_promises(everyone, epsilon, tested, 300)
    assert broken <= DELTA + tolerance
    assert loose > 0.9, "a test that never certifies anything keeps every promise"
    broken, _ = share_of_broken_promises(everyone, epsilon, optimistic, 300)
    assert broken > DELTA + tolerance, "the harness must notice a rule that breaks the promise"
