"""Certificates of mode fast: thresholds at which its own answers keep a contract. Numpy only.

A contract says: in the mean over answers, at most a share epsilon of an answer's tokens are such that full depth would
have chosen otherwise. The answers are greedy ones of the mode itself, on prompts that nothing before has seen; the loss
of an answer is the share of its tokens that full depth, which reads the produced text, disagrees with, capped.

Learn then Test (Angelopoulos et al., 2022), by fixed sequence: thresholds are tried from strict to loose on the same
prompts, and the first that fails ends the search. Each is tested against "the mean loss is above epsilon" by betting
(Waudby-Smith and Ramdas, 2023): were that so, the wealth of a player who stakes on small losses would be a
supermartingale that starts at 1, and it reaches 1 / delta with probability at most delta. The contracts of one artefact
share delta.

What it does not say: anything of one answer, of sampled ones, of answers longer than the longest of these, or of other
kinds of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tide_core.errors import ConfigError
from tide_core.exits.artefact.contract import LOSS_CAP, FastContract

STEP = 0.25
"""Between two thresholds, in the logit of the score."""
STRICTEST, LOOSEST = 7.0, -1.0
STAKES = np.linspace(0.02, 0.98, 49)
"""Shares of the largest stake that cannot ruin; the player starts with an equal part of the wealth on each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found of one answer of mode fast."""

    num_tokens: int
    num_differing: int
    """Tokens in whose place full depth, given those before, would have chosen another one."""
    layers_per_token: float

    @property
    def loss(self) -> float:
        return min(self.num_differing / self.num_tokens, LOSS_CAP)


Answers = Callable[[float], Sequence[Answer]]
"""Answers of mode fast at a threshold, on the same prompts in the same order each time."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be certified, and on which prompts."""

    epsilons: tuple[float, ...]
    delta: float
    max_tokens: int
    """Of an answer."""
    selection: Sequence[Sequence[int]]
    """Token ids of prompts to choose on."""
    prompts: Sequence[Sequence[int]]
    """Those to certify on; nothing before has seen them."""
    num_exits: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A threshold that was tried, for the report."""

    threshold: float
    disagreement: float
    """Mean loss."""
    layers_per_token: float
    num_answers: int
    p_value: float
    """Of the contract it was tried for."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class Certified:
    contracts: tuple[FastContract, ...]
    tried: tuple[Tried, ...]


def p_value(losses: Sequence[float], epsilon: float) -> float:
    """Of "the mean loss is above epsilon", by betting on losses in 0..LOSS_CAP, in their order."""
    gains = epsilon - np.asarray(losses, dtype=np.float64)
    largest = 1.0 / (LOSS_CAP - epsilon) if epsilon < LOSS_CAP else math.inf
    if not len(gains) or not math.isfinite(largest):
        return 1.0
    wealth = np.cumsum(np.log1p(np.outer(STAKES * largest, gains)), axis=1)
    together = np.logaddexp.reduce(wealth, axis=0) - math.log(len(STAKES))
    return float(math.exp(-max(0.0, float(together.max()))))


def thresholds() -> tuple[float, ...]:
    """From strict to loose, evenly spaced in the logit of the score; the same for every model."""
    logits = np.arange(STRICTEST, LOOSEST - STEP / 2, -STEP)
    return tuple(float(score) for score in 1.0 / (1.0 + np.exp(-logits)))


def certify(goal: Goal, answers: Answers, selection: Answers) -> Certified:
    """The loosest certified threshold for each epsilon, where one is certified.

    `answers` are those to the prompts of the goal, `selection` those to its prompts to choose on: they only say where
    to begin, so what they find wrong costs power and no validity."""
    epsilons, delta = goal.epsilons, goal.delta
    grid, contracts, tried = thresholds(), [], []
    known: dict[float, Sequence[Answer]] = {}
    for epsilon in epsilons:
        best: FastContract | None = None
        for threshold in grid[_begin(selection, grid, epsilon) :]:
            if threshold not in known:
                known[threshold] = answers(threshold)
            found = known[threshold]
            p = p_value([answer.loss for answer in found], epsilon)
            each = _summary(found)
            tried.append(Tried(threshold, *each, len(found), p, epsilon))
            if p > delta / len(epsilons):
                break
            best = FastContract(
                epsilon, delta, (threshold,) * goal.num_exits, each[0], each[1], len(found), goal.max_tokens
            )
        if best is not None:
            contracts.append(best)
    return Certified(tuple(contracts), tuple(tried))


def _begin(selection: Answers, grid: Sequence[float], epsilon: float) -> int:
    """The index of the threshold to begin with: two steps stricter than the loosest one that keeps epsilon on the
    selection, which is found by bisection."""
    low, high = 0, len(grid)  # grid[low] is taken to keep it, grid[high] not
    while high - low > 1:
        middle = (low + high) // 2
        if _summary(selection(grid[middle]))[0] <= epsilon:
            low = middle
        else:
            high = middle
    return max(0, low - 2)


def _summary(answers: Sequence[Answer]) -> tuple[float, float]:
    """Mean loss, and layers per token over all tokens."""
    if not answers:
        raise ConfigError("held-out prompts", 0, "at least one")
    tokens = sum(answer.num_tokens for answer in answers)
    layers = sum(answer.num_tokens * answer.layers_per_token for answer in answers)
    return float(np.mean([answer.loss for answer in answers])), layers / tokens
