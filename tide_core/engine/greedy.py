"""What becomes of a cycle that ran in one go: the rule of `verify`, as far as it is left to the host.

Here the drafts of all passes have been made and verified before anybody looks at a score. A score below the threshold
would have saved the passes behind it; they are done, so a draft counts that is right, unless the request itself has
asked for a threshold, or for a bound: that was certified for drafts at the threshold of calibration. Right is a draft
that the device says too: the likeliest token, or in a row that draws at random a draft that the rejection rule lets
stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from tide_core.batch import DraftCounts, RowResult, RowStep, TokenResult
from tide_core.quick import quick
from tide_core.request import Audit

make_token, make_result, make_counts = quick(TokenResult), quick(RowResult), quick(DraftCounts)
NOTHING_DRAFTED = DraftCounts()


class Drafted(NamedTuple):
    """What the draft passes of one row say, and maybe more passes behind them: scores and tokens."""

    scores: Sequence[float]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Settler:
    """Makes results of what the passes of a cycle say."""

    exit_layer: int
    num_layers: int

    def plain(self, best: float, best_id: int, num_tokens: int = 1) -> RowResult:
        """What `row` makes of a row that has drafted nothing; it may have run more tokens than one."""
        layers_run = num_tokens * self.num_layers
        if not isfinite(best):
            return make_result((), num_tokens, layers_run, NOTHING_DRAFTED, _numerical_error(best))
        return make_result((make_token(best_id, self.num_layers),), num_tokens, layers_run, NOTHING_DRAFTED)

    def prompt(self, step: RowStep, best: float, best_id: int) -> RowResult:
        """What follows a piece of a prompt: the likeliest token, if it is the last piece."""
        num = len(step.token_ids)
        if step.samples:
            return self.plain(best, best_id, num)
        return make_result((), num, num * self.num_layers, NOTHING_DRAFTED)

    def row(
        self, step: RowStep, drafted: Drafted, best: Sequence[float], best_ids: Sequence[int], *, branches: int = 1
    ) -> RowResult:
        """`best` are the largest logits at full depth behind the newest token and behind each draft, `best_ids` the
        tokens that follow. All of it ran for each of the row's branches."""
        taken, score, non_finite = _taken(step, drafted)
        count = step.num_drafts
        layers_run = branches * (count * self.exit_layer + (count + 1) * self.num_layers)
        tokens, error = self._tokens(step, drafted, taken, score, best, best_ids)
        accepted = len(tokens) if error is not None else len(tokens) - 1
        if error is not None and tokens:  # the text may end with these; if not, the next step fails too
            return make_result(tuple(tokens), accepted, layers_run, make_counts(taken, accepted, non_finite, count))
        num_valid = 1 + accepted
        return make_result(tuple(tokens), num_valid, layers_run, make_counts(taken, accepted, non_finite, count), error)

    def _tokens(
        self,
        step: RowStep,
        drafted: Drafted,
        taken: int,
        score: float | None,
        best: Sequence[float],
        best_ids: Sequence[int],
    ) -> tuple[list[TokenResult], str | None]:
        """The tokens that follow, up to the one full depth adds itself or up to the error."""
        tokens: list[TokenResult] = []
        exit_layer, leave = self.exit_layer, step.policy.exit_thresholds[0] if taken else inf
        scores, token_ids = drafted
        for ahead in range(taken + 1):
            if not isfinite(best[ahead]):
                return tokens, _numerical_error(best[ahead])
            right = best_ids[ahead]
            if ahead == taken:
                break
            token_id, score_here = token_ids[ahead], scores[ahead]
            if score_here >= leave:
                audit = Audit.AGREED if token_id == right else Audit.DISAGREED
                tokens.append(make_token(token_id, exit_layer, None, (), score_here, audit))
            elif token_id == right:
                tokens.append(make_token(token_id, exit_layer, None, (), score_here))
            else:
                score = score_here
                break
        tokens.append(make_token(right, self.num_layers, None, (), score))
        return tokens, None


def _taken(step: RowStep, drafted: Drafted) -> tuple[int, float | None, int]:
    """How many drafts count, the score of the one behind them that does not, and scores that are no numbers."""
    request, count = step.request, step.num_drafts
    least = -inf if request.params.threshold is None else request.params.threshold
    if step.policy.epsilon is not None:  # its bound was certified for drafts that end here
        least = step.policy.draft_thresholds[0]
    scores, token_ids = drafted
    if least < 0.0 and isfinite(sum(scores)) and request.end_ids.isdisjoint(token_ids):
        return count, None, 0  # as nearly always: nothing can end them
    for ahead in range(count):
        score = scores[ahead]
        if not score >= least or not isfinite(score):
            return ahead, score, int(not isfinite(score))
        if token_ids[ahead] in request.end_ids:
            return ahead + 1, None, 0
    return count, None, 0


def _numerical_error(best: float) -> str:
    return f"numerical_error: the largest logit of the row is {best}"
