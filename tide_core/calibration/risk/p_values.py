"""p-values of "the expected loss is above epsilon", from independent losses in 0..1. No torch here.

Each answers: were it so, how likely would losses as small as these be? All hold for any number of sequences, not only
in the limit. Which one is used must be settled before the losses are seen.

    binomial            losses that are 0 or 1; exact
    hoeffding-bentkus   any losses; looks at their total alone, so it allows for the widest spread there could be
    betting             any losses; gains from a small spread, as rates of long sequences have it. Of 2,000 sequences of
                        200 tokens and epsilon 1 % it certifies a mean loss of .8 %, the one above .5 %
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tide_core.errors import ConfigError

TESTS = ("betting", "hoeffding-bentkus", "binomial")

STAKES = tuple(2.0**-k for k in range(7))
"""Of the boldest bet that cannot lose more than all."""
_WEIGHTS = np.array([3.0**-k for k in range(7)]) / sum(3.0**-k for k in range(7))


def p_value(losses: NDArray[np.float64], epsilon: float, test: str) -> float:
    """By the named test, for losses [N]."""
    total = math.fsum(losses)
    if test == "betting":
        return betting_p_value(losses, epsilon)
    if test == "hoeffding-bentkus":
        return hoeffding_bentkus_p_value(total, len(losses), epsilon)
    if test != "binomial":
        raise ConfigError("test", test, f"one of {', '.join(TESTS)}")
    if not np.isin(losses, (0.0, 1.0)).all():
        raise ConfigError("test", test, "betting or hoeffding-bentkus: there are losses other than 0 and 1")
    return binomial_p_value(round(total), len(losses), epsilon)


def betting_p_value(losses: NDArray[np.float64], epsilon: float) -> float:
    """One over the final capital of players who bet, sequence by sequence, that losses are below epsilon.

    A player multiplies what is left by 1 + stake * (epsilon - loss) / (1 - epsilon). If the expected loss is above
    epsilon no such game is favourable: the capital, 1 at the start, stays at most 1 in expectation and is 1/delta or
    more with probability at most delta. Several players of fixed stakes share the first capital."""
    with np.errstate(divide="ignore"):
        gains = np.log1p(np.outer(STAKES, epsilon - losses) / (1.0 - epsilon)).sum(1) + np.log(_WEIGHTS)
    best = float(gains.max())
    if best == -math.inf:
        return 1.0
    return math.exp(min(0.0, -best - math.log(float(np.exp(gains - best).sum()))))


def binomial_p_value(num_failures: int, n: int, epsilon: float) -> float:
    """Exact, for losses that are 0 or 1."""
    return binomial_cdf(num_failures, n, epsilon)


def hoeffding_bentkus_p_value(total_loss: float, n: int, epsilon: float) -> float:
    """The smaller of Hoeffding's bound, in its form with relative entropy, and Bentkus'.

    Both bound the same probability, as functions of the total alone; so does their minimum."""
    mean = min(total_loss / n, 1.0)
    hoeffding = math.exp(-n * _relative_entropy(min(mean, epsilon), epsilon))
    bentkus = math.e * binomial_cdf(math.ceil(total_loss), n, epsilon)
    return min(1.0, hoeffding, bentkus)


def fewest_sequences(epsilon: float, delta: float, test: str) -> int:
    """How many sequences it takes to certify anything: with fewer, not even losses of 0 throughout have p <= delta."""
    enough = math.ceil(math.log(delta) / math.log1p(-epsilon))
    if test != "betting":
        return enough
    growth = np.log1p(np.array(STAKES) * epsilon / (1.0 - epsilon))  # of each player, per sequence
    while float((_WEIGHTS * np.exp(enough * growth)).sum()) < 1.0 / delta:
        enough += 1
    return enough


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) for X ~ Binomial(n, p), with a relative error of about 1e-9 at n = 10^6 and less below.

    Summed from the largest term outwards, on the smaller side of the distribution: a few times sqrt(n) terms."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    if k <= n * p:
        return min(1.0, _tail_down(k, n, p))
    return max(0.0, 1.0 - _tail_down(n - k - 1, n, 1.0 - p))  # P(X > k) = P(n - X <= n - k - 1)


def _tail_down(k: int, n: int, p: float) -> float:
    """P(X <= k) for k at most the mean, where terms only fall on the way down."""
    log_term = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    log_term += k * math.log(p) + (n - k) * math.log1p(-p)
    odds = (1.0 - p) / p
    total = term = 1.0
    for i in range(k, 0, -1):
        term *= i * odds / (n - i + 1)
        total += term
        if term < 1e-17 * total:
            break
    return math.exp(log_term) * total


def _relative_entropy(a: float, b: float) -> float:
    """KL(Bernoulli(a) || Bernoulli(b)) for 0 <= a <= b < 1."""
    head = a * math.log(a / b) if a > 0.0 else 0.0
    return head + (1.0 - a) * (math.log1p(-a) - math.log1p(-b))
