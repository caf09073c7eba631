"""The rule by which a draft is kept or dropped. No torch here.

A draft counts if its score is finite and reaches the row's `min_score`. A draft that counts is accepted if full depth
agrees with it, or if its score reaches `exit_score`: from there on it is emitted whatever full depth chooses (mode
bounded; infinite in mode verified). The first draft that is not accepted ends the cycle of its row, and the full-depth
token takes its place.

Whether full depth agrees is decided before: greedy rows compare tokens, sampled rows apply the rejection rule of
speculative sampling (`verify.rejects`; on a GPU `kernels.reference.draw.verify_drawn`).

On the plain path `verify.Verifier` calls `accept`. On a GPU the rule runs inside the cycle:
`csrc/cuda/cycle/accept_drafts.cu`, defined by `kernels.reference.cycle.accept_drafts`, is the fast twin of `accept`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NamedTuple

from tide_core.batch import RowStep
from tide_core.request import ExitPolicy, Request


class Thresholds(NamedTuple):
    """Router scores that decide about a draft."""

    min_score: float = -inf
    """Least score at which a draft counts."""
    exit_score: float = inf
    """Least score at which a draft is emitted whatever full depth chooses."""

    def counts(self, score: float) -> bool:
        return isfinite(score) and score >= self.min_score

    def leaves(self, score: float) -> bool:
        return score >= self.exit_score


def accept(drafts: Iterable[tuple[float, bool, Thresholds]]) -> int:
    """How many drafts are accepted, from the first on. Each is given as its score, whether full depth agrees with it,
    and the thresholds of its checkpoint. Drafts after the first that is not accepted are not looked at."""
    accepted = 0
    for score, agrees, thresholds in drafts:
        if not thresholds.counts(score) or not (agrees or thresholds.leaves(score)):
            break
        accepted += 1
    return accepted


def drafting_thresholds(step: RowStep, checkpoint: int) -> Thresholds:
    """While a row drafts token by token: a score below the calibrated threshold ends drafting and saves passes."""
    policy = step.policy
    return Thresholds(policy.draft_thresholds[checkpoint], policy.exit_thresholds[checkpoint])


def cycle_thresholds(request: Request, policy: ExitPolicy) -> Thresholds:
    """Where all drafts of a cycle are made before a score is read, a low score saves nothing. So the calibrated
    threshold does not apply, only that of the request, and that of a certified bound."""
    min_score = request.params.threshold
    if policy.epsilon is not None:  # certified for drafts that end at the calibrated threshold
        min_score = policy.draft_thresholds[0]
    exit_score = policy.exit_thresholds[0] if policy.may_exit else inf
    return Thresholds(-inf if min_score is None else min_score, exit_score)
