"""Log-probabilities of prompts, on the plain path: the head runs on every token of a chunk, a few at a time.

The state of a token at full depth gives the log-probabilities of the token after it. So a chunk scores the tokens after
its own, up to the end of the prompt; the first token of a prompt has no score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tide_core.batch import RowResult, RowStep
from tide_core.execution.depth_loop import Ran
from tide_core.exits.row_cycle import RowCycle
from tide_core.models.adapter import ModelAdapter
from tide_core.request import PromptToken
from tide_core.sampling.sampler import prompt_logprobs

MAX_TOKENS = 64
"""Whose logits exist at a time: memory does not grow with the prompt."""


def with_prompt_logprobs(
    adapter: ModelAdapter,
    rows: Sequence[RowCycle],
    results: Sequence[RowResult],
    deep: Ran,
    normed: torch.Tensor | None,
) -> list[RowResult]:
    """The results of a step, with log-probabilities for the rows that score their prompt. `normed`: the states of
    `deep` after the final norm, where they are known. Logits that are not finite end the row, as in sampling."""

    def logits_of(first: int, stop: int) -> torch.Tensor:
        return adapter.head(adapter.norm(deep.states[first:stop]) if normed is None else normed[first:stop])

    begins, end = {}, 0
    for row, (first, stop) in deep.parts:
        begins[id(row)], end = end, end + stop - first
    scored = list(results)
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if not row.step.scores_prompt or result.error is not None:
            continue
        tokens, error = _score(row.step, begins.get(id(row), 0), logits_of)
        if error is None:
            scored[index] = result._replace(prompt_logprobs=tuple(tokens))
        else:
            scored[index] = RowResult(num_valid=result.num_valid, layers_run=result.layers_run, error=error)
    return scored


def _score(
    step: RowStep, begin: int, logits_of: Callable[[int, int], torch.Tensor]
) -> tuple[list[PromptToken], str | None]:
    """The tokens that the step scores, or an error. `begin`: where the step's tokens begin in the flat states."""
    prompt_ids, num_likeliest, targets = (
        step.request.prompt_ids,
        step.request.params.prompt_logprobs,
        step.prompt_targets,
    )
    assert num_likeliest is not None
    tokens = [PromptToken(prompt_ids[0])] if targets.start == 0 else []
    offset = begin - step.start - 1  # a token is scored by the one before it
    for first in range(targets.start + len(tokens), targets.stop, MAX_TOKENS):
        stop = min(first + MAX_TOKENS, targets.stop)
        more, error = prompt_logprobs(logits_of(first + offset, stop + offset), prompt_ids[first:stop], num_likeliest)
        if error is not None:
            return [], error
        tokens += more
    return tokens, None
