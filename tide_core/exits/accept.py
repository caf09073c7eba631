"""What becomes of a cycle that ran in one go: the rule of `verify`, as far as it is left to the host.

Here the drafts of all passes have been made and verified before anybody looks at a score. A score below the threshold
would have saved the passes behind it; they are done, so a draft counts that is right, unless the request itself has
asked for a threshold, or for a bound: that was certified for drafts at the threshold of calibration. Right is a draft
that the device says too: the likeliest token, or in a row that draws at random a draft that the rejection rule lets
stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite

from tide_core.batch import NOTHING_DRAFTED, DraftCounts, RowResult, RowStep, TokenResult
from tide_core.quick import quick
from tide_core.request import Audit

make_result = quick(RowResult)
NO_SCORE = (None,)
Drafted = tuple[tuple[float, ...], tuple[int, ...]]
"""What the draft passes of one row say, and maybe more passes behind them: scores and tokens."""
Outcome = tuple[tuple[int, ...], int, tuple[DraftCounts, ...]]


@dataclass(frozen=True, slots=True)
class Settler:
    """Makes results of what the passes of a cycle say."""

    exit_layer: int
    num_layers: int

    def plain(self, best: float, best_id: int, num_tokens: int = 1) -> RowResult:
        """What `row` makes of a row that has drafted nothing; it may have run more tokens than one."""
        layers_run = num_tokens * self.num_layers
        if not isfinite(best):
            return make_result((), (), (), num_tokens, layers_run, NOTHING_DRAFTED, _numerical_error(best))
        return make_result((best_id,), (self.num_layers,), NO_SCORE, num_tokens, layers_run)

    def prompt(self, step: RowStep, best: float, best_id: int) -> RowResult:
        """What follows a piece of a prompt: the likeliest token, if it is the last piece."""
        num = len(step.token_ids)
        if step.samples:
            return self.plain(best, best_id, num)
        return make_result((), (), (), num, num * self.num_layers)

    def row(
        self,
        step: RowStep,
        drafts: int,
        drafted: Drafted,
        best: Sequence[float],
        best_ids: tuple[int, ...],
        *,
        branches: int = 1,
        is_finite: bool = False,
    ) -> RowResult:
        """`best` are the largest logits at full depth behind the newest token and behind each of so many drafts,
        `best_ids` the tokens that follow. All of it ran for each of the row's branches. `is_finite`: it is known that
        all these numbers and the scores are."""
        request = step.request
        is_free = step.policy.is_lossless and request.params.threshold is None
        if is_finite and is_free and request.end_ids.isdisjoint(drafted[1]):
            return self._sound(drafts, drafted, best_ids, branches)
        taken, score, non_finite = _taken(step, drafts, drafted)
        layers_run = branches * (drafts * self.exit_layer + (drafts + 1) * self.num_layers)
        tokens, error = self._tokens(step, drafted, taken, score, best, best_ids)
        accepted = len(tokens) if error is not None else len(tokens) - 1
        counts = (DraftCounts(taken, accepted, non_finite, drafts),)
        if error is not None and tokens:  # the text may end with these; if not, the next step fails too
            return RowResult.of(tokens, accepted, layers_run, counts)
        return RowResult.of(tokens, 1 + accepted, layers_run, counts, error)

    def _sound(self, drafts: int, drafted: Drafted, best_ids: tuple[int, ...], branches: int) -> RowResult:
        """Where nothing leaves for good, any score will do, and no draft ends the text: drafts count that are right."""
        scores, token_ids = drafted
        accepted = 0
        while accepted < drafts and token_ids[accepted] == best_ids[accepted]:
            accepted += 1
        exit_layers, layers_run, counts = _outcome(self.exit_layer, self.num_layers, drafts, branches, accepted)
        if accepted == drafts:
            return make_result(best_ids, exit_layers, (*scores[:drafts], None), drafts + 1, layers_run, counts)
        kept = accepted + 1
        return make_result(best_ids[:kept], exit_layers, scores[:kept], kept, layers_run, counts)

    def legs(
        self, drafts: int, gains: tuple[int, ...], token_ids: tuple[int, ...], scores: tuple[float | None, ...]
    ) -> RowResult:
        """Of a row that has gained so many tokens in each of several cycles; all as in `_sound`."""
        exit_layers, layers_run, counts = _outcomes(self.exit_layer, self.num_layers, drafts, gains)
        return make_result(token_ids, exit_layers, scores, len(token_ids), layers_run, counts)

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
                tokens.append(TokenResult(token_id, exit_layer, None, (), score_here, audit))
            elif token_id == right:
                tokens.append(TokenResult(token_id, exit_layer, None, (), score_here))
            else:
                score = score_here
                break
        tokens.append(TokenResult(right, self.num_layers, None, (), score))
        return tokens, None


@functools.cache
def _outcome(exit_layer: int, num_layers: int, drafts: int, branches: int, accepted: int) -> Outcome:
    """Of a row with so many drafts of which so many are right: exit layers, layers run, counts. The same few for all
    rows and steps."""
    exit_layers = (*[exit_layer] * accepted, num_layers)
    layers_run = branches * (drafts * exit_layer + (drafts + 1) * num_layers)
    return exit_layers, layers_run, (DraftCounts(drafts, accepted, 0, drafts),)


@functools.cache
def _outcomes(exit_layer: int, num_layers: int, drafts: int, gains: tuple[int, ...]) -> Outcome:
    """Of several cycles in which a row with so many drafts gains so many tokens."""
    layers = exit_layer, num_layers
    exit_layers, layers_run, counts = zip(*[_outcome(*layers, drafts, 1, gain - 1) for gain in gains], strict=True)
    return tuple(chain(*exit_layers)), sum(layers_run), tuple(chain(*counts))


def _taken(step: RowStep, drafts: int, drafted: Drafted) -> tuple[int, float | None, int]:
    """How many drafts count, the score of the one behind them that does not, and scores that are no numbers."""
    request = step.request
    least = -inf if request.params.threshold is None else request.params.threshold
    if step.policy.epsilon is not None:  # its bound was certified for drafts that end here
        least = step.policy.draft_thresholds[0]
    scores, token_ids = drafted
    for ahead in range(drafts):
        score = scores[ahead]
        if not score >= least or not isfinite(score):
            return ahead, score, int(not isfinite(score))
        if token_ids[ahead] in request.end_ids:
            return ahead + 1, None, 0
    return drafts, None, 0


def _numerical_error(best: float) -> str:
    return f"numerical_error: the largest logit of the row is {best}"
