"""One token for each row of logits.

The steps, in order; the code follows the numbers:

 1. Finite check: a row whose logits hold a NaN or +inf, or nothing but -inf, gets an error; its mates go on.
 2. Logit bias.                                         (adjust.py)
 3. Fewest tokens: end-of-text and stop ids masked.     (adjust.py)
 4. Repetition penalty over prompt and output.          (adjust.py)
 5. Presence and frequency penalties over the output.   (adjust.py)
 6. Grammar: tokens that cannot follow are masked.      (adjust.py)
 7. Greedy rows: the largest logit, the lowest id among equals. Done.
 8. Temperature.                                        (weights.py)
 9. Top-k.                                              (weights.py)
10. Top-p, over what top-k leaves.                      (weights.py)
11. Min-p, relative to the likeliest token.             (weights.py)
12. Draw, with one number made from seed and step.      (draw.py)
13. Log-probabilities for rows that ask: those of the model's own distribution, untouched by steps 2 to 11.

A row's result never depends on its mates: nothing is reduced over rows, and the sums that feed a draw are integers.
Rows pay only for the steps they ask for: a plain greedy row costs its share of step 1, which finds the token too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tide_core.kernels.cpu.best import best
from tide_core.request import PromptToken
from tide_core.sampling.adjust import adjusted, needs_adjusting
from tide_core.sampling.draw import draw, uniform
from tide_core.sampling.rows import SampledToken, SamplingRow
from tide_core.sampling.weights import select_rows, token_weights

__all__ = [
    "SampledToken",
    "SamplingRow",
    "probabilities_of",
    "prompt_logprobs",
    "sample",
    "sample_with_chances",
    "with_logprobs",
]

NO_TOKEN = -1
AFTER_ADJUSTING = " after bias, masks and penalties"


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose a token for each row of `logits` [R, V]; any float dtype, any device. `logits` is not changed."""
    assert logits.shape[:-1] == (len(rows),), "one row of logits for each row"
    if not rows:
        return []
    token_ids, errors = _best(logits)  # 1
    worked = [r for r, row in enumerate(rows) if r not in errors and (not row.params.is_greedy or needs_adjusting(row))]
    if worked:
        chosen, failed, _, _ = _choose(select_rows(logits, worked).float(), [rows[r] for r in worked])  # 2 to 12
        for position, r in enumerate(worked):
            token_ids[r] = chosen[position]
            if position in failed:
                errors[r] = failed[position]
    return [
        SampledToken(NO_TOKEN, error=errors[r]) if r in errors else with_logprobs(logits[r], row, token_ids[r])  # 13
        for r, row in enumerate(rows)
    ]


def sample_with_chances(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[tuple[SampledToken, torch.Tensor | None]]:
    """The tokens of `sample`, without log-probabilities, and for each that was drawn the distribution it was drawn
    from, as `probabilities_of` has it: [V] float64. Both come from one pass over the vocabulary."""
    if not rows:
        return []
    _, errors = _best(logits)
    tokens = [SampledToken(NO_TOKEN, error=errors.get(r)) for r in range(len(rows))]
    chances: list[torch.Tensor | None] = [None] * len(rows)
    sound = [r for r in range(len(rows)) if r not in errors]
    if sound:
        chosen, failed, drawn, weights = _choose(select_rows(logits, sound).float(), [rows[r] for r in sound])
        for position, r in enumerate(sound):
            error = failed.get(position)
            tokens[r] = SampledToken(chosen[position] if error is None else NO_TOKEN, error=error)
        if weights is not None:
            for position, row in zip(drawn, _probabilities(weights), strict=True):
                chances[sound[position]] = row
    return list(zip(tokens, chances, strict=True))


def probabilities_of(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, dict[int, str]]:
    """The distributions that `sample` draws from: [R, V] logits to [R, V] float64, and errors by row."""
    _, errors = _best(logits)
    logits = adjusted(logits.float(), rows)
    best_ids, after = _best(logits, AFTER_ADJUSTING)
    errors = {**after, **errors}
    if errors:
        logits = logits.clone()
        logits[list(errors)] = 0.0  # so that the others can be processed; these are not used
    weights = token_weights(logits, [row.params for row in rows])
    probabilities = _probabilities(weights)
    for r, row in enumerate(rows):
        if row.params.is_greedy:
            probabilities[r] = 0.0
            probabilities[r, best_ids[r]] = 1.0
    return probabilities, errors


def _probabilities(weights: torch.Tensor) -> torch.Tensor:
    return weights.double() / weights.sum(-1, keepdim=True)


def _choose(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int], dict[int, str], list[int], torch.Tensor | None]:
    """Tokens for the rows of `logits` [R, V] float32, errors by position; which were drawn, and their weights."""
    logits = adjusted(logits, rows)  # 2 to 6
    token_ids, errors = _best(logits, AFTER_ADJUSTING)  # 7
    drawn = [r for r, row in enumerate(rows) if not row.params.is_greedy and r not in errors]
    weights = None
    if drawn:
        mine = [rows[r] for r in drawn]
        weights = token_weights(select_rows(logits, drawn), [row.params for row in mine])  # 8 to 11
        numbers = [uniform(row.seed, len(row.output_ids), row.stream, row.distance) for row in mine]
        for r, token_id in zip(drawn, draw(weights, numbers).tolist(), strict=True):  # 12
            token_ids[r] = token_id
    return token_ids, errors, drawn, weights


def _best(logits: torch.Tensor, when: str = "") -> tuple[list[int], dict[int, str]]:
    """The largest logit's id in each row of [R, V], the lowest among equals, and errors by row.

    The maximum of a row is NaN if any logit is, +inf if any is, and -inf only if all are: one look at it is the whole
    finite check.
    """
    maxima, best_ids = best(logits)
    errors = {
        r: f"numerical_error: the largest logit of the row is {maximum}{when}"
        for r, maximum in enumerate(maxima)
        if not math.isfinite(maximum)
    }
    return best_ids, errors


def with_logprobs(logits_row: torch.Tensor, row: SamplingRow, token_id: int) -> SampledToken:
    """The token with the log-probabilities its row asks for."""
    if row.params.logprobs is None:
        return SampledToken(token_id)
    [(logprob, likeliest)] = _logprobs(logits_row.unsqueeze(0), [token_id], row.params.logprobs)
    return SampledToken(token_id, logprob, likeliest)


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_likeliest: int
) -> tuple[list[PromptToken], str | None]:
    """The tokens of a prompt under the logits [T, V] in their places, or the error of the first place that has one."""
    _, errors = _best(logits)
    if errors:
        return [], errors[min(errors)]
    listed = zip(token_ids, _logprobs(logits, token_ids, num_likeliest), strict=True)
    return [PromptToken(token_id, *logprobs) for token_id, logprobs in listed], None


def _logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_likeliest: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row of `logits` [T, V] the log-probability of its token, and id and log-probability of the likeliest,
    equals by lower id; tokens the model rules out are not listed."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    k = min(num_likeliest, logits.shape[1])
    if k == 0:
        return [(logprob, ()) for logprob in own]
    ids = _ranking_keys(logits).topk(k).indices
    likeliest = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    return [
        (logprob, tuple((i, v) for i, v in zip(*columns, strict=True) if v > -math.inf))
        for logprob, columns in zip(own, likeliest, strict=True)
    ]


def _ranking_keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers [T, V] in the order of the logits [T, V] float32, equals by lower id, so that no two are equal.

    By logit and not by log-probability, where rounding makes new equals: the first is what greedy chooses."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats are in reverse order
    return (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
