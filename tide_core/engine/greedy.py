"""What becomes of a cycle in which every row takes the likeliest token: the rule of `verify`, for that case alone.

Here the drafts of all passes have been made and verified before anybody looks at a score. A score below the threshold
would have saved the passes behind it; they are done, so a draft counts that is right, unless the request itself has
asked for a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tide_core.batch import DraftCounts, RowResult, RowStep, TokenResult
from tide_core.request import Audit


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft passes of one row say: scores, and the likeliest tokens."""

    scores: Sequence[float]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Settler:
    """Makes results of what the passes of a cycle say."""

    exit_layer: int
    num_layers: int

    def row(self, step: RowStep, drafted: Drafted, best: Sequence[float], best_ids: Sequence[int]) -> RowResult:
        """`best` are the largest logits at full depth behind the newest token and behind each draft, `best_ids` their
        tokens."""
        taken, score, non_finite = self._taken(step, drafted)
        tokens: list[TokenResult] = []
        leave = step.policy.exit_thresholds[0] if taken else math.inf
        for ahead in range(taken):
            if not math.isfinite(best[ahead]):
                return self._failed(step, tokens, best[ahead], taken, non_finite)
            token_id, said, right = drafted.token_ids[ahead], drafted.scores[ahead], best_ids[ahead]
            if said >= leave:
                tokens.append(_left(token_id, self.exit_layer, said, agrees=token_id == right))
            elif token_id == right:
                tokens.append(TokenResult(token_id, self.exit_layer, None, (), said))
            else:
                tokens.append(TokenResult(right, self.num_layers, None, (), said))
                return self._result(step, tokens, ahead, taken, non_finite)
        if not math.isfinite(best[taken]):
            return self._failed(step, tokens, best[taken], taken, non_finite)
        tokens.append(TokenResult(best_ids[taken], self.num_layers, None, (), score))
        return self._result(step, tokens, taken, taken, non_finite)

    def _taken(self, step: RowStep, drafted: Drafted) -> tuple[int, float | None, int]:
        """How many drafts count, the score of the one behind them that does not, and scores that are no numbers."""
        params, request = step.request.params, step.request
        least = -math.inf if params.threshold is None else params.threshold
        for ahead in range(step.num_drafts):
            score, token_id = drafted.scores[ahead], drafted.token_ids[ahead]
            if not score >= least or not math.isfinite(score):
                return ahead, score, int(not math.isfinite(score))
            if token_id in params.stop_ids or (token_id in request.eos_ids and not params.ignore_eos):
                return ahead + 1, None, 0
        return step.num_drafts, None, 0

    def _failed(
        self, step: RowStep, tokens: Sequence[TokenResult], largest: float, taken: int, non_finite: int
    ) -> RowResult:
        """Tokens decided before the failure are kept: the text may end with them. If not, the next step fails too."""
        if tokens:
            return self._result(step, tokens, len(tokens), taken, non_finite, still_to_run=1)
        error = f"numerical_error: the largest logit of the row is {largest}"
        return self._result(step, (), 0, taken, non_finite, error=error)

    def _result(
        self,
        step: RowStep,
        tokens: Sequence[TokenResult],
        accepted: int,
        taken: int,
        non_finite: int,
        *,
        still_to_run: int = 0,
        error: str | None = None,
    ) -> RowResult:
        return RowResult(
            tokens=tuple(tokens),
            num_valid=1 + accepted - still_to_run,
            layers_run=step.num_drafts * self.exit_layer + (step.num_drafts + 1) * self.num_layers,
            counts=DraftCounts(taken, accepted, non_finite),
            error=error,
        )


def _left(token_id: int, layer: int, score: float, *, agrees: bool) -> TokenResult:
    return TokenResult(token_id, layer, None, (), score, Audit.AGREED if agrees else Audit.DISAGREED)
