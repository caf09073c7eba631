"""Certify exit thresholds for mode `bounded`: Learn-then-Test on held-out sequences. No torch here.

Mode `bounded` promises that the expected disagreement with full depth, per generated token, is at most epsilon. The
loss of a sequence is disagreements / tokens, in 0..1, when its cycles exit at the threshold (`simulate`). The unit is
the sequence because tokens of one text are not independent.

1. `threshold_grid` fixes the thresholds before any data is read, from strict to loose.
2. `measure_risk` computes the loss of every sequence at every threshold.
3. `certify_threshold` tests the null hypothesis "expected loss > epsilon" at each threshold in the order of the grid
   and stops at the first one that it cannot reject at level delta.
4. The last rejected threshold is certified. To certify a wrong threshold, the test must reject the first true null
   hypothesis in the order, which has probability at most delta. So the whole grid costs no more than one test.

Conditions: the sequences are a fair sample of future ones, and no earlier choice used them (the draft threshold, the
number of drafts and the head come from other sequences). Each (epsilon, delta) pair is a promise of its own. The losses
are for cycles of `max_drafts` drafts; fewer drafts at run time give fewer exits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tide_core.calibration.risk.simulate import PackedTraces, simulate_all
from tide_core.errors import ConfigError

STAKES = tuple(2.0**-k for k in range(7))
"""Fractions of the largest bet that cannot lose more than the whole capital."""
_WEIGHTS = np.array([3.0**-k for k in range(7)]) / sum(3.0**-k for k in range(7))


def threshold_grid() -> tuple[float, ...]:
    """Thresholds from strict to loose, evenly spaced in the logit of the score; the same for every model."""
    logits = np.arange(10.0, -3.01, -0.0625)
    return tuple(float(score) for score in (1.0 / (1.0 + np.exp(-logits))).astype(np.float32))


@dataclass(frozen=True, slots=True)
class RiskCurve:
    """Losses of N held-out sequences at the G thresholds of a grid."""

    thresholds: tuple[float, ...]
    """From strict to loose."""
    losses: NDArray[np.float64]
    """[G, N] disagreements / tokens."""
    coverage: tuple[float, ...]
    """[G] share of all tokens emitted at an exit."""

    @property
    def num_sequences(self) -> int:
        return int(self.losses.shape[1])

    @property
    def risks(self) -> tuple[float, ...]:
        """Mean loss at every threshold."""
        return tuple(math.fsum(row) / self.num_sequences for row in self.losses)


@dataclass(frozen=True, slots=True)
class Certification:
    """The result of the test for one (epsilon, delta)."""

    epsilon: float
    delta: float
    threshold: float | None
    """The loosest certified threshold. None: no threshold is certified, and mode `bounded` refuses this epsilon."""
    num_sequences: int
    risk: float
    """Mean loss at the threshold, or at the strictest one if none is certified."""
    coverage: float
    """Share of tokens emitted at an exit, at the same threshold as `risk`."""
    p_value: float
    """At the same threshold as `risk`."""

    def __str__(self) -> str:
        promise = f"epsilon {self.epsilon:g}, delta {self.delta:g}"
        if self.threshold is not None:
            share = f"{self.coverage:.1%} of tokens leave early, {self.risk:.3%} disagree"
            return f"{promise}: threshold {self.threshold:.4f}, {share} ({self.num_sequences} sequences)"
        needed = fewest_sequences(self.epsilon, self.delta)
        if self.num_sequences < needed:
            why = f"it takes at least {needed} held-out sequences, there are {self.num_sequences}"
        else:
            why = f"at the strictest one {self.risk:.3%} of tokens disagree on {self.num_sequences} sequences"
            why += f" (p-value {self.p_value:.3g})"
        return f"{promise}: no threshold could be certified, mode bounded is refused; {why}"


def measure_risk(
    traces: PackedTraces, *, draft_threshold: float, max_drafts: int, grid: Sequence[float] | None = None
) -> RiskCurve:
    """Losses at every threshold of the grid. Sequences without a token are left out."""
    thresholds = tuple(threshold_grid() if grid is None else grid)
    if not thresholds or any(a <= b for a, b in pairwise(thresholds)):
        raise ConfigError("grid", thresholds, "thresholds from strict to loose, each below the one before")
    kept = traces.lengths > 0
    if not kept.any():
        raise ConfigError("traces", 0, "at least one sequence with a token")
    losses = np.empty((len(thresholds), int(kept.sum())))
    coverage = []
    for index, threshold in enumerate(thresholds):
        walks = simulate_all(traces, draft_threshold=draft_threshold, max_drafts=max_drafts, exit_threshold=threshold)
        tokens = walks.tokens[kept]
        losses[index] = walks.disagreements[kept] / tokens
        coverage.append(int(walks.exits.sum()) / int(tokens.sum()))
    return RiskCurve(thresholds, losses, tuple(coverage))


def certify_threshold(curve: RiskCurve, epsilon: float, delta: float) -> Certification:
    """The loosest threshold with expected loss at most epsilon, wrong with probability at most delta.

    Fixed-sequence test from strict to loose; see the module's docstring for why one delta covers the whole grid."""
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
            raise ConfigError(name, value, "a number above 0 and below 1")
    p_values: list[float] = []
    for losses in curve.losses:
        p_values.append(betting_p_value(losses, epsilon))
        if p_values[-1] > delta:
            break
    num_certified = len(p_values) - (p_values[-1] > delta)
    shown = max(num_certified - 1, 0)
    return Certification(
        epsilon=epsilon,
        delta=delta,
        threshold=curve.thresholds[shown] if num_certified else None,
        num_sequences=curve.num_sequences,
        risk=curve.risks[shown],
        coverage=curve.coverage[shown],
        p_value=p_values[shown],
    )


def strictest(results: Sequence[Certification]) -> Certification:
    """The result that holds on every part that was tested: without a threshold if one of them has none."""
    return max(results, key=lambda result: math.inf if result.threshold is None else result.threshold)


def betting_p_value(losses: NDArray[np.float64], epsilon: float) -> float:
    """p-value of "the expected loss is above epsilon" for independent losses [N] in 0..1, valid for any N.

    One over the final capital of players who bet, sequence by sequence, that losses are below epsilon: a player
    multiplies the capital by 1 + stake * (epsilon - loss) / (1 - epsilon). If the expected loss is above epsilon, the
    expected capital never exceeds its start of 1, so it reaches 1/delta with probability at most delta. Several players
    with fixed stakes share the first capital. The bet gains from a small spread, which rates of long sequences have:
    with 2,000 sequences of 200 tokens and epsilon 1 % it certifies a mean loss of 0.8 %."""
    with np.errstate(divide="ignore"):
        gains = np.log1p(np.outer(STAKES, epsilon - losses) / (1.0 - epsilon)).sum(1) + np.log(_WEIGHTS)
    best = float(gains.max())
    if best == -math.inf:
        return 1.0
    return math.exp(min(0.0, -best - math.log(float(np.exp(gains - best).sum()))))


def fewest_sequences(epsilon: float, delta: float) -> int:
    """The number of sequences below which even losses of 0 throughout have a p-value above delta."""
    num = math.ceil(math.log(delta) / math.log1p(-epsilon))
    growth = np.log1p(np.array(STAKES) * epsilon / (1.0 - epsilon))  # of each player, per sequence
    while float((_WEIGHTS * np.exp(num * growth)).sum()) < 1.0 / delta:
        num += 1
    return num
