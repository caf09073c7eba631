"""Certificates of mode fast: how often they are wrong, and how much they leave on the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tide_core.calibration.risk.certify import Answer, Goal, certify, p_value, thresholds
from tide_core.errors import ConfigError
from tide_core.exits.artefact.contract import LOSS_CAP

NUM_TOKENS = 100


def goal(*epsilons: float) -> Goal:
    return Goal(epsilons, 0.05, 96, [], [], 3)


def made(rates: Sequence[float], *, layers: float = 20.0) -> list[Answer]:
    return [Answer(NUM_TOKENS, round(rate * NUM_TOKENS), layers) for rate in rates]


def bursts(generator: np.random.Generator, mean: float, num: int) -> np.ndarray:
    """Losses of which most are none and some are large, as of a mode that goes astray now and then."""
    return np.where(generator.random(num) < mean / 0.4, 0.4, 0.0)


def test_a_contract_that_is_not_kept_is_certified_in_at_most_delta_of_all_runs() -> None:
    generator = np.random.default_rng(0)
    wrong = sum(p_value(bursts(generator, 0.0501, 300).tolist(), 0.05) <= 0.05 for _ in range(2000))
    assert wrong <= 0.05 * 2000


def test_a_contract_that_is_kept_with_some_room_is_certified() -> None:
    generator = np.random.default_rng(1)
    smooth = generator.beta(2, 60, (200, 256))  # mean .032
    right = sum(p_value(losses.tolist(), 0.05) <= 0.025 for losses in smooth)
    assert right >= 190


def test_losses_are_capped_and_few_answers_prove_nothing() -> None:
    assert Answer(10, 9, 1.0).loss == LOSS_CAP
    assert p_value([], 0.05) == 1.0
    assert p_value([0.0] * 10, 0.05) > 0.05
    assert p_value([0.0] * 60, 0.05) <= 0.05
    assert p_value([0.0] * 1000, LOSS_CAP) == 1.0


def rising(threshold: float) -> list[Answer]:
    """The looser the threshold, the more tokens differ and the fewer layers run: .05 at .75, .1 at .5."""
    rate = 0.2 * (1 - threshold)
    spread = np.random.default_rng(2).permutation(np.linspace(0.0, 2.0 * rate, 256))
    return made(spread.tolist(), layers=10 + 20 * threshold)


def test_the_loosest_threshold_that_passes_is_taken_for_each_epsilon() -> None:
    found = certify(goal(0.05, 0.1), rising, rising)
    tight, loose = found.contracts
    assert (tight.epsilon, loose.epsilon) == (0.05, 0.1)
    assert tight.thresholds == (tight.thresholds[0],) * 3
    assert 0.75 < tight.thresholds[0] < 0.9
    assert 0.5 < loose.thresholds[0] < tight.thresholds[0]
    assert tight.disagreement <= 0.05
    assert loose.disagreement <= 0.1
    assert (tight.num_sequences, tight.max_tokens, tight.delta) == (256, 96, 0.05)
    assert tight.layers_per_token == pytest.approx(10 + 20 * tight.thresholds[0])
    grid = thresholds()
    assert all(each.threshold in grid for each in found.tried)


def test_the_search_ends_at_the_first_threshold_that_fails() -> None:
    asked: list[float] = []

    def answers(threshold: float) -> list[Answer]:
        asked.append(threshold)
        good_again = threshold < 0.6
        return made([0.0 if good_again or threshold > 0.8 else 0.2] * 200)

    def selection(threshold: float) -> list[Answer]:
        return made([0.0 if threshold > 0.75 else 0.2])

    found = certify(goal(0.05), answers, selection)
    [contract] = found.contracts
    assert contract.thresholds[0] > 0.8
    assert 0.6 < asked[-1] < 0.8  # failed; nothing looser was asked for, though it would have passed


def test_nothing_is_certified_where_every_threshold_fails() -> None:
    always = certify(goal(0.05), lambda _: made([0.3] * 200), lambda _: made([0.3] * 20))
    assert always.contracts == ()
    assert [each.p_value for each in always.tried] == [1.0]


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="held-out prompts"):
        certify(goal(0.05), lambda _: [], lambda _: [])
