"""What goes into the sampler for one row and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_core.request import SamplingParams, TokenMask


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know of one row. All ids are below the width of the logits."""

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens generated so far; their number is the step index of the draw."""
    eos_ids: tuple[int, ...]
    stream: int = 0
    """Which of the seed's random numbers are used."""
    distance: int = 0
    """Of a draft: how many were made before it in this cycle."""
    mask: TokenMask | None = None
    """Follows the grammar of the row."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one row, or why none could be."""

    token_id: int
    """-1 when there is an `error`."""
    logprob: float | None = None
    """Log-probability of the token under the model itself; None unless the row asked for it."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, best first; tokens the model rules out are not listed."""
    error: str | None = None
    """Starts with `numerical_error`; the other rows are not touched by it."""
