"""The live audit: evidence against a contract that may be looked at after every answer."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from tide_core.errors import ConfigError
from tide_core.exits.artefact.contract import LOSS_CAP
from tide_core.exits.audit import MAX_EVIDENCE, NUM_BETS, AuditProcess

pytestmark = pytest.mark.unit

EPSILON, DELTA = 0.05, 0.05
STREAMS, ANSWERS = 1000, 2000
TOKENS = 40


def bursts(generator: np.random.Generator, rate: float, shape: tuple[int, ...]) -> np.ndarray:
    """Losses of answers that are right as a rule, or wrong for one long stretch: the tokens of an answer depend on each
    other. The mean is exactly the rate."""
    share = 0.2
    return np.where(generator.random(shape) < rate / share, share, 0.0)


def broken(generator: np.random.Generator, rate: float, shape: tuple[int, ...]) -> np.ndarray:
    """Losses of answers that are right, or wrong nearly throughout."""
    share = 0.4
    return np.where(generator.random(shape) < rate / share, share, 0.0)


def independent(generator: np.random.Generator, rate: float, shape: tuple[int, ...]) -> np.ndarray:
    """Losses of answers whose tokens are wrong one by one."""
    losses: np.ndarray = generator.binomial(TOKENS, rate, shape) / TOKENS
    return losses


def evidence_of(losses: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Evidence after each answer of each stream [streams, answers], by the formula of the contract."""
    bets = 2.0 ** -np.arange(NUM_BETS) / epsilon
    money = np.zeros((len(losses), NUM_BETS))
    evidence, given = np.empty(losses.shape), 0.0
    for t in range(1, losses.shape[1] + 1):
        new = 1.0 / (1.0 + math.log(t)) - 1.0 / (1.0 + math.log(t + 1))
        given += new
        money = (money + new) * (1.0 + bets * (np.minimum(losses[:, t - 1 : t], LOSS_CAP) - epsilon))
        evidence[:, t - 1] = 1.0 - given + money.mean(axis=1)
    return evidence


def answers_until_alarm(losses: np.ndarray) -> int | None:
    process = AuditProcess(EPSILON, DELTA)
    for number, loss in enumerate(losses.tolist(), 1):
        process.observe(loss)
        if process.alarmed:
            return number
    return None


@pytest.mark.parametrize("kind", [bursts, independent])
def test_the_process_is_the_one_of_the_contract(kind: object) -> None:
    assert callable(kind)
    losses = kind(np.random.default_rng(5), 2 * EPSILON, (1, 300))
    process, got = AuditProcess(EPSILON, DELTA), []
    for loss in losses[0].tolist():
        process.observe(loss)
        got.append(process.snapshot().evidence)
    assert got == pytest.approx(evidence_of(losses)[0].tolist(), rel=1e-9)


@pytest.mark.parametrize("kind", [bursts, independent, broken])
def test_streams_that_keep_the_contract_exactly_raise_an_alarm_in_at_most_delta_of_them(kind: object) -> None:
    assert callable(kind)
    losses = kind(np.random.default_rng(7), EPSILON, (STREAMS, ANSWERS))
    assert losses.mean() == pytest.approx(EPSILON, rel=0.01)
    assert (evidence_of(losses).max(axis=1) >= 1.0 / DELTA).sum() <= DELTA * STREAMS


@pytest.mark.parametrize(("kind", "most"), [(bursts, 60), (independent, 60), (broken, 90)])
def test_a_threefold_rise_behind_ten_thousand_good_answers_is_soon_seen(kind: object, most: int) -> None:
    assert callable(kind)
    generator, good, waits = np.random.default_rng(11), 10_000, []
    for _ in range(6):
        before = kind(generator, 0.5 * EPSILON, (good,))
        seen = answers_until_alarm(np.concatenate([before, kind(generator, 3 * EPSILON, (500,))]))
        assert seen is not None
        assert seen > good, "a contract that is kept twice over raises no alarm"
        waits.append(seen - good)
    assert np.mean(waits) <= most


def test_a_threefold_rise_at_the_start_is_seen_within_a_few_answers() -> None:
    generator = np.random.default_rng(13)
    waits = [answers_until_alarm(independent(generator, 3 * EPSILON, (200,))) for _ in range(20)]
    assert np.mean([200 if wait is None else wait for wait in waits]) <= 20


def test_an_alarm_stays_raised() -> None:
    process = AuditProcess(EPSILON, DELTA)
    for _ in range(50):
        process.observe(1.0)
    assert process.alarmed
    for _ in range(5000):
        process.observe(0.0)
    snapshot = process.snapshot()
    assert snapshot.evidence < 1.0 / DELTA
    assert snapshot.alarmed


def test_one_answer_counts_at_most_half_wrong() -> None:
    whole, half = AuditProcess(EPSILON), AuditProcess(EPSILON)
    whole.observe(1.0)
    half.observe(LOSS_CAP)
    assert whole.snapshot() == half.snapshot()
    assert whole.snapshot().mean_loss == LOSS_CAP


def test_evidence_stays_a_finite_number() -> None:
    process = AuditProcess(1e-6, DELTA)
    for _ in range(2000):
        process.observe(1.0)
    assert 1.0 / DELTA < process.snapshot().evidence <= MAX_EVIDENCE
    for _ in range(2000):
        process.observe(0.0)
    assert 0.0 <= process.snapshot().evidence <= MAX_EVIDENCE


def test_without_a_contract_losses_are_counted_and_nothing_raises_an_alarm() -> None:
    process = AuditProcess(None, DELTA)
    for _ in range(1000):
        process.observe(0.25)
    snapshot = process.snapshot()
    assert (snapshot.num_answers, snapshot.mean_loss) == (1000, 0.25)
    assert (snapshot.evidence, snapshot.alarmed) == (1.0, False)


def test_a_snapshot_is_plain_numbers() -> None:
    process = AuditProcess(EPSILON, DELTA)
    assert process.snapshot().evidence == 1.0
    process.observe(0.2)
    process.observe(0.1)
    snapshot = process.snapshot("someone")
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert (snapshot.tenant, snapshot.epsilon, snapshot.delta) == ("someone", EPSILON, DELTA)
    assert (snapshot.num_answers, snapshot.mean_loss) == (2, pytest.approx(0.15))


@pytest.mark.parametrize("loss", [-0.1, 1.1, math.nan])
def test_a_loss_that_is_no_share_is_refused(loss: float) -> None:
    process = AuditProcess(EPSILON)
    with pytest.raises(ConfigError, match="a share from 0 to 1"):
        process.observe(loss)
    assert process.snapshot().num_answers == 0


@pytest.mark.parametrize("value", [0.0, 1.0, True])
def test_a_contract_or_a_confidence_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"delta: .* a number above 0 and below 1"):
        AuditProcess(EPSILON, value)
    with pytest.raises(ConfigError, match=r"epsilon: .* a number above 0 and below 1"):
        AuditProcess(value)
