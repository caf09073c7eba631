"""The live audit: an interval that may be looked at after every token, and a bound that breaks once."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from tide_core.errors import ConfigError
from tide_core.exits.audit import AuditBook, AuditLedger

pytestmark = pytest.mark.unit

RUNS = 300
TOKENS = 5000
STEP = 5
EPSILON = 0.02
DELTA = 0.1


def drawn_counts(rate: float, seed: int = 0) -> list[list[int]]:
    """Disagreements in each batch of `STEP` tokens, for every run."""
    counts: list[list[int]] = np.random.default_rng(seed).binomial(STEP, rate, (RUNS, TOKENS // STEP)).tolist()
    return counts


def interval(ledger: AuditLedger) -> tuple[float, float]:
    snapshot = ledger.snapshot()
    return snapshot.lower, snapshot.upper


def share_of_tripped(rate: float) -> float:
    tripped = 0
    for run in drawn_counts(rate):
        ledger = AuditLedger(EPSILON, DELTA)
        for disagreements in run:
            ledger.observe(STEP, disagreements)
        tripped += ledger.broken
    return tripped / RUNS


def test_a_rate_at_the_bound_trips_in_at_most_delta_of_all_runs_however_long_one_looks() -> None:
    share = share_of_tripped(EPSILON)
    assert share <= DELTA + 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / RUNS)
    assert share > 0.0, "a ledger that cannot trip keeps every promise"


def test_a_test_made_for_one_look_would_trip_too_often_when_it_is_looked_at_every_time() -> None:
    """The same harness on the ordinary one-sided bound: it notices what is not valid at every moment."""
    tripped = 0
    for run in drawn_counts(EPSILON):
        wrong = np.cumsum(run)
        tokens = STEP * np.arange(1, len(run) + 1)
        deviation = np.sqrt(EPSILON * (1 - EPSILON) / tokens)
        tripped += bool((wrong / tokens > EPSILON + 1.2816 * deviation).any())  # 90 % quantile
    assert tripped / RUNS > 2 * DELTA


def test_a_rate_of_three_times_the_bound_trips_soon() -> None:
    needed = []
    for run in drawn_counts(3 * EPSILON):
        ledger = AuditLedger(EPSILON, DELTA)
        for disagreements in run:
            ledger.observe(STEP, disagreements)
            if ledger.broken:
                break
        needed.append(ledger.snapshot().num_tokens if ledger.broken else math.inf)
    assert np.median(needed) < 500
    assert max(needed) < 3000


@pytest.mark.parametrize("epsilon", [None, EPSILON])
@pytest.mark.parametrize("rate", [0.0, 0.005, 0.3, 1.0])
def test_the_interval_holds_the_rate_at_every_step_of_nearly_all_runs(rate: float, epsilon: float | None) -> None:
    missed = 0
    for run in drawn_counts(rate)[:100]:
        ledger = AuditLedger(epsilon, DELTA)
        for step in range(0, len(run), 50):
            for disagreements in run[step : step + 50]:
                ledger.observe(STEP, disagreements)
            lower, upper = interval(ledger)
            if not lower <= rate <= upper:
                missed += 1
                break
    assert missed / 100 <= DELTA + 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / 100)


def test_the_bound_breaks_exactly_when_the_lower_end_passes_it() -> None:
    random = np.random.default_rng(4)
    for _ in range(20):
        ledger = AuditLedger(EPSILON, DELTA)
        while not ledger.broken:
            assert interval(ledger)[0] <= EPSILON * (1 + 1e-9)
            ledger.observe(1, int(random.random() < 4 * EPSILON))
        assert interval(ledger)[0] > EPSILON * (1 - 1e-9)


def test_the_interval_is_that_of_the_mixture_martingale() -> None:
    ledger = AuditLedger(0.1, 0.05)
    ledger.observe(40, 11)
    q = (np.arange(200_000) + 0.5) / 200_000
    prior = (1 - q) ** 8  # Beta(1, 9)
    likelihood = q**11 * (1 - q) ** 29
    mixture = float((prior * likelihood).sum() / prior.sum())
    for end in interval(ledger):
        assert mixture / (end**11 * (1 - end) ** 29) == pytest.approx(20.0, rel=1e-3)


def test_the_interval_narrows_and_is_everything_before_the_first_token() -> None:
    ledger = AuditLedger(EPSILON)
    assert interval(ledger) == (0.0, 1.0)
    widths = []
    for _ in range(5):
        ledger.observe(1000, 10)
        lower, upper = interval(ledger)
        assert lower < 0.01 < upper
        widths.append(upper - lower)
    assert widths == sorted(widths, reverse=True)
    ledger = AuditLedger(EPSILON)
    ledger.observe(10, 0)
    assert interval(ledger)[0] == 0.0
    ledger = AuditLedger(EPSILON)
    ledger.observe(10, 10)
    assert interval(ledger)[1] == 1.0


def test_a_broken_bound_stays_broken() -> None:
    ledger = AuditLedger(EPSILON, DELTA)
    ledger.observe(100, 50)
    assert ledger.broken
    ledger.observe(10**6, 0)
    assert ledger.broken
    assert interval(ledger)[1] < EPSILON


def test_an_audit_without_a_bound_has_an_interval_and_nothing_to_break() -> None:
    ledger = AuditLedger()
    ledger.observe(100, 100)
    assert not ledger.broken
    assert interval(ledger)[0] > 0.9


def test_counts_beyond_a_billion_stay_sound() -> None:
    ledger = AuditLedger(EPSILON, DELTA)
    ledger.observe(10**10, 10**8)
    lower, upper = interval(ledger)
    assert 0.00999 < lower < 0.01 < upper < 0.01001
    assert not ledger.broken


def test_a_snapshot_is_plain_numbers() -> None:
    ledger = AuditLedger(EPSILON, DELTA)
    ledger.observe(200, 3)
    snapshot = ledger.snapshot()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert (snapshot.rate, snapshot.epsilon, snapshot.delta, snapshot.broken) == (0.015, EPSILON, DELTA, False)


@pytest.mark.parametrize(("tokens", "disagreements"), [(1, 2), (0, 1), (5, -1)])
def test_more_disagreements_than_tokens_are_refused(tokens: int, disagreements: int) -> None:
    ledger = AuditLedger(EPSILON)
    with pytest.raises(ConfigError, match=f"num_disagreements: got {disagreements}, expected a count in 0..{tokens}"):
        ledger.observe(tokens, disagreements)
    assert ledger.snapshot().num_tokens == 0


@pytest.mark.parametrize("settings", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"epsilon": 0.1, "delta": 0.0}])
def test_bounds_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a number above 0 and below 1"):
        AuditLedger(**settings)


def test_a_book_keeps_a_ledger_per_key() -> None:
    book = AuditBook(DELTA)
    book.ledger((2, 0.02), 0.02).observe(100, 60)
    book.ledger((2, 0.05), 0.05).observe(100, 0)
    book.ledger("fast").observe(10, 1)
    assert {key: snapshot.broken for key, snapshot in book.snapshots().items()} == {
        (2, 0.02): True,
        (2, 0.05): False,
        "fast": False,
    }
    assert book.ledger((2, 0.02), 0.02).snapshot().num_tokens == 100
