"""Which exit thresholds keep a promise: Learn-then-Test on held-out sequences. No torch here.

The promise of mode `bounded` is: the expected disagreement with full depth, per generated token, is at most epsilon. A
threshold tau breaks it if E[loss] > epsilon, where the loss of a sequence is disagreements / tokens, in 0..1, under the
cycle walk with that threshold. The unit is the sequence, because tokens of one text are not independent.

1. The grid of thresholds is fixed before the data is seen, from strict to loose.
2. Every threshold has a null hypothesis "E[loss] > epsilon" and a p-value that is valid for any number of sequences.
3. Thresholds are tested in the order of the grid; the first one that is not rejected ends the test.
4. The last one rejected is taken. A false choice needs the first false null in the order to be rejected, and that
   happens with probability at most delta. So the whole family costs no more than one test.

What has to hold for it: the sequences are a fair sample of those to come, and nothing before has looked at them. The
draft threshold, the number of drafts and the head must have been chosen on others. Several (epsilon, delta) pairs are
several promises, each with its own delta. The losses are those of cycles with `max_drafts` drafts; fewer drafts at run
time mean fewer exits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tide_core.calibration.risk.p_values import TESTS, fewest_sequences, p_value
from tide_core.calibration.risk.simulate import PackedTraces, simulate_all
from tide_core.errors import ConfigError

LOSSES = ("rate", "any")


def threshold_grid() -> tuple[float, ...]:
    """Thresholds from strict to loose, even in the logit of the score; the same for every model."""
    logits = np.arange(10.0, -3.01, -0.0625)
    return tuple(float(score) for score in (1.0 / (1.0 + np.exp(-logits))).astype(np.float32))


@dataclass(frozen=True, slots=True)
class RiskCurve:
    """Losses of N held-out sequences at the G thresholds of a grid."""

    thresholds: tuple[float, ...]
    """From strict to loose."""
    losses: NDArray[np.float64]
    """[G, N]"""
    coverage: tuple[float, ...]
    """Share of all tokens emitted at an exit, [G]."""
    loss: str = "rate"
    """`rate`: disagreements / tokens. `any`: 1 if the sequence has a disagreement."""
    test: str = "betting"

    @property
    def num_sequences(self) -> int:
        return int(self.losses.shape[1])

    @property
    def risks(self) -> tuple[float, ...]:
        """Mean loss at every threshold."""
        return tuple(math.fsum(row) / self.num_sequences for row in self.losses)

    def p_value(self, index: int, epsilon: float) -> float:
        """Of "the expected loss at this threshold is above epsilon"."""
        return p_value(self.losses[index], epsilon, self.test)


@dataclass(frozen=True, slots=True)
class RiskChoice:
    """What the test found for one (epsilon, delta)."""

    epsilon: float
    delta: float
    threshold: float | None
    """The loosest certified threshold; None: no threshold could be certified, and mode `bounded` at this epsilon is
    refused with the artefact."""
    num_sequences: int
    risk: float
    """Mean loss of the threshold; of the strictest one if none was certified."""
    coverage: float
    """Share of tokens emitted at an exit, likewise."""
    p_value: float
    """Likewise."""
    test: str

    @property
    def certified(self) -> bool:
        return self.threshold is not None

    def __str__(self) -> str:
        promise = f"epsilon {self.epsilon:g}, delta {self.delta:g}"
        if self.threshold is not None:
            share = f"{self.coverage:.1%} of tokens leave early, {self.risk:.3%} disagree"
            return f"{promise}: threshold {self.threshold:.4f}, {share} ({self.num_sequences} sequences)"
        needed = fewest_sequences(self.epsilon, self.delta, self.test)
        if self.num_sequences < needed:
            why = f"it takes at least {needed} held-out sequences, there are {self.num_sequences}"
        else:
            why = f"at the strictest one {self.risk:.3%} of tokens disagree on {self.num_sequences} sequences"
            why += f" (p-value {self.p_value:.3g})"
        return f"{promise}: no threshold could be certified, mode bounded is refused; {why}"


def risk_curve(
    traces: PackedTraces,
    *,
    draft_threshold: float,
    max_drafts: int,
    grid: Sequence[float] | None = None,
    loss: str = "rate",
    test: str | None = None,
) -> RiskCurve:
    """Losses at every threshold of the grid. Sequences without a token say nothing and are left out.

    Without a `test`: betting for rates, the exact binomial one for losses of 0 and 1."""
    thresholds = tuple(threshold_grid() if grid is None else grid)
    if not thresholds or any(a <= b for a, b in pairwise(thresholds)):
        raise ConfigError("grid", thresholds, "thresholds from strict to loose, each below the one before")
    if loss not in LOSSES:
        raise ConfigError("loss", loss, f"one of {', '.join(LOSSES)}")
    test = test or ("binomial" if loss == "any" else "betting")
    if test not in TESTS or (test == "binomial" and loss == "rate"):
        raise ConfigError("test", test, f"one of {', '.join(TESTS)}; binomial for the loss `any` only")
    kept = traces.lengths > 0
    if not kept.any():
        raise ConfigError("traces", 0, "at least one sequence with a token")
    losses = np.empty((len(thresholds), int(kept.sum())))
    coverage = []
    for index, threshold in enumerate(thresholds):
        walks = simulate_all(traces, draft_threshold=draft_threshold, max_drafts=max_drafts, exit_threshold=threshold)
        wrong, tokens = walks.disagreements[kept], walks.tokens[kept]
        losses[index] = wrong > 0 if loss == "any" else wrong / tokens
        coverage.append(int(walks.exits.sum()) / int(tokens.sum()))
    return RiskCurve(thresholds, losses, tuple(coverage), loss, test)


def choose_threshold(curve: RiskCurve, epsilon: float, delta: float) -> RiskChoice:
    """Fixed-sequence test from strict to loose; family-wise error at most delta."""
    _check_promise(epsilon, delta)
    p_values: list[float] = []
    for index in range(len(curve.thresholds)):
        p_values.append(curve.p_value(index, epsilon))
        if p_values[-1] > delta:
            break
    certified = len(p_values) - (p_values[-1] > delta)
    shown = max(certified - 1, 0)
    return RiskChoice(
        epsilon=epsilon,
        delta=delta,
        threshold=curve.thresholds[shown] if certified else None,
        num_sequences=curve.num_sequences,
        risk=curve.risks[shown],
        coverage=curve.coverage[shown],
        p_value=p_values[shown],
        test=curve.test,
    )


def choose_thresholds(curve: RiskCurve, epsilons: Iterable[float], delta: float) -> tuple[RiskChoice, ...]:
    return tuple(choose_threshold(curve, epsilon, delta) for epsilon in epsilons)


def verify_choice(
    traces: PackedTraces,
    *,
    threshold: float,
    epsilon: float,
    delta: float,
    draft_threshold: float,
    max_drafts: int,
    loss: str = "rate",
    test: str | None = None,
) -> float:
    """Test a claimed threshold again on the sequences it is claimed for: its p-value, or an error if it is too high."""
    _check_promise(epsilon, delta)
    curve = risk_curve(
        traces, draft_threshold=draft_threshold, max_drafts=max_drafts, grid=(threshold,), loss=loss, test=test
    )
    found = curve.p_value(0, epsilon)
    if found > delta:
        evidence = f"on {curve.num_sequences} sequences it is {found:.4g}, with a mean risk of {curve.risks[0]:.4g}"
        expected = f"one whose p-value for epsilon {epsilon:g} is at most {delta:g}; {evidence}"
        raise ConfigError("threshold", threshold, expected)
    return found


def _check_promise(epsilon: float, delta: float) -> None:
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
            raise ConfigError(name, value, "a number above 0 and below 1")
