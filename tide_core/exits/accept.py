"""The rule by which a draft is kept or dropped. No torch here.

A draft counts if its score is finite and reaches the least score of its row. A draft that counts is accepted if full
depth agrees with it. In mode bounded one that full depth would not have chosen is accepted as well, if the answer stays
within its budget and the draft is a near tie (`keeps`). The first draft that is not accepted ends the cycle of its row,
and the full-depth token takes its place.

Whether full depth agrees is decided before: greedy rows compare tokens, sampled rows apply the rejection rule of
speculative sampling (`verify.rejects`; on a GPU `kernels.reference.draw.verify_drawn`).

On the plain path `verify.Verifier` calls `accept`. On a GPU the rule runs inside the cycle:
`csrc/cuda/cycle/accept_drafts.cu`, defined by `kernels.reference.cycle.accept_drafts`, is the fast twin of `accept`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NamedTuple

from tide_core.request import Budget, Request


class Compared(NamedTuple):
    """A draft, and what full depth finds of it."""

    score: float
    agrees: bool
    gap: float = inf
    """By how many nats full depth's choice is likelier."""
    min_score: float = -inf
    """Least score at which it counts."""


def counts(score: float, min_score: float) -> bool:
    return isfinite(score) and score >= min_score


def keeps(budget: Budget, gap: float, emitted: int, differing: int) -> bool:
    """Whether a token that full depth would not have chosen may be emitted after `emitted` others of the answer, of
    which `differing` differ.

    At every moment at most `epsilon` of an answer's tokens differ, and each by at most `margin`. The product is one of
    doubles and `gap` is a difference of float32 numbers: the kernel computes the same, bit for bit."""
    return differing + 1 <= budget.epsilon * (emitted + 1) and gap <= budget.margin


def accept(
    drafts: Iterable[Compared], budget: Budget | None = None, emitted: int = 0, differing: int = 0
) -> list[float | None]:
    """For each draft that is accepted, from the first on: its gap where full depth would not have chosen it, else None.
    Drafts after the first that is not accepted are not looked at. `emitted` tokens of the answer come before the first,
    of which `differing` differ."""
    accepted: list[float | None] = []
    for score, agrees, gap, min_score in drafts:
        if not counts(score, min_score):
            break
        if agrees:
            accepted.append(None)
        elif budget is not None and keeps(budget, gap, emitted + len(accepted), differing):
            accepted.append(gap)
            differing += 1
        else:
            break
    return accepted


def cycle_min_score(request: Request) -> float:
    """Where all drafts of a cycle are made before a score is read, a low score saves nothing. So the calibrated
    threshold does not apply, only that of the request."""
    threshold = request.params.threshold
    return -inf if threshold is None else threshold
