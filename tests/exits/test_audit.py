"""The live audit: an interval that may be looked at after every token."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from tide_core.errors import ConfigError
from tide_core.exits.audit import AuditLedger

pytestmark = pytest.mark.unit

RUNS = 300
TOKENS = 5000
STEP = 5
DELTA = 0.1


def drawn_counts(rate: float, seed: int = 0) -> list[list[int]]:
    """Disagreements in each batch of `STEP` tokens, for every run."""
    counts: list[list[int]] = np.random.default_rng(seed).binomial(STEP, rate, (RUNS, TOKENS // STEP)).tolist()
    return counts


def interval(ledger: AuditLedger) -> tuple[float, float]:
    snapshot = ledger.snapshot()
    return snapshot.lower, snapshot.upper


@pytest.mark.parametrize("rate", [0.0, 0.005, 0.3, 1.0])
def test_the_interval_holds_the_rate_at_every_step_of_nearly_all_runs(rate: float) -> None:
    missed = 0
    for run in drawn_counts(rate)[:100]:
        ledger = AuditLedger(DELTA)
        for step in range(0, len(run), 50):
            for disagreements in run[step : step + 50]:
                ledger.observe(STEP, disagreements)
            lower, upper = interval(ledger)
            if not lower <= rate <= upper:
                missed += 1
                break
    assert missed / 100 <= DELTA + 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / 100)


def test_the_interval_is_that_of_the_mixture_martingale() -> None:
    ledger = AuditLedger(0.05)
    ledger.observe(40, 11)
    q = (np.arange(200_000) + 0.5) / 200_000
    prior = 1 / np.sqrt(q * (1 - q))  # Beta(1/2, 1/2)
    likelihood = q**11 * (1 - q) ** 29
    mixture = float((prior * likelihood).sum() / prior.sum())
    for end in interval(ledger):
        assert mixture / (end**11 * (1 - end) ** 29) == pytest.approx(20.0, rel=1e-3)


def test_the_interval_narrows_and_is_everything_before_the_first_token() -> None:
    ledger = AuditLedger()
    assert interval(ledger) == (0.0, 1.0)
    widths = []
    for _ in range(5):
        ledger.observe(1000, 10)
        lower, upper = interval(ledger)
        assert lower < 0.01 < upper
        widths.append(upper - lower)
    assert widths == sorted(widths, reverse=True)
    ledger = AuditLedger()
    ledger.observe(10, 0)
    assert interval(ledger)[0] == 0.0
    ledger = AuditLedger()
    ledger.observe(10, 10)
    assert interval(ledger)[1] == 1.0


def test_counts_beyond_a_billion_stay_sound() -> None:
    ledger = AuditLedger(DELTA)
    ledger.observe(10**10, 10**8)
    lower, upper = interval(ledger)
    assert 0.00999 < lower < 0.01 < upper < 0.01001


def test_a_snapshot_is_plain_numbers() -> None:
    ledger = AuditLedger(DELTA)
    ledger.observe(200, 3)
    snapshot = ledger.snapshot()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert (snapshot.rate, snapshot.delta) == (0.015, DELTA)


@pytest.mark.parametrize(("tokens", "disagreements"), [(1, 2), (0, 1), (5, -1)])
def test_more_disagreements_than_tokens_are_refused(tokens: int, disagreements: int) -> None:
    ledger = AuditLedger()
    with pytest.raises(ConfigError, match=f"num_disagreements: got {disagreements}, expected a count in 0..{tokens}"):
        ledger.observe(tokens, disagreements)
    assert ledger.snapshot().num_tokens == 0


@pytest.mark.parametrize("delta", [0.0, 1.0, True])
def test_a_confidence_that_means_nothing_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="a number above 0 and below 1"):
        AuditLedger(delta)
