"""Bias, masks and penalties of rows in a captured cycle, in plain Torch: steps 2 to 5 of `tide_core.sampling.sampler`,
from state on the device. On a GPU each function is one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tide_core.kernels.reference.cycle import ADJUST_SLOT, DRAFTS, PROMPT_LEN

MOST_ENTRIES = 512
REPETITION, PRESENCE, FREQUENCY = range(3)
"""The rows of `AdjustState.penalties`."""
IN_PROMPT = -0x8000
"""The sign bit of a count: the token occurs in the prompt."""
MOST_OUTPUTS = 0x7FFF
"""A count stays there."""


class AdjustState(NamedTuple):
    """Of S slots, a row with adjustments in each; V tokens in the vocabulary, E entries."""

    counts: Tensor
    """[S, V] int16: how often a token occurs in the output so far, the newest token included, and `IN_PROMPT`."""
    penalties: Tensor
    """[3, S] float64, because `tide_core.sampling.adjust` adds presence and frequency in float64."""
    entry_ids: Tensor
    """[S, E] int32: token ids, -1 where unused."""
    entry_values: Tensor
    """[S, E] float32: what is added to the logit of the token, in the order of the entries."""
    entry_until: Tensor
    """[S, E] int32: an entry applies while the row has fewer output tokens than this."""


def adjust_logits(
    logits: Tensor,
    columns: Tensor | None,
    sources: Tensor,
    starts: Tensor,
    positions: Tensor,
    drafted: Tensor,
    row_meta: Tensor,
    state: AdjustState,
    out: Tensor,
) -> None:
    """Rows of `logits` [N, C] as their requests ask for them, into `out` [N, C] float32, which may be `logits` itself.

    Column c stands for token `columns[c]`, or for token c without `columns`. Row n follows the drafts of row
    `sources[n] % R` before distance `sources[n] // R`: these count as output. A row without a slot is copied."""
    num_rows = row_meta.shape[1]
    ids = torch.arange(logits.shape[1], device=logits.device) if columns is None else columns
    out[:] = logits
    for n, source in enumerate(sources.tolist()):
        distance, r = divmod(source, num_rows)
        slot = int(row_meta[ADJUST_SLOT, r])
        if slot < 0 or row_meta[DRAFTS, r] < 0:
            continue
        num_outputs = int(positions[starts[r]]) + distance + 1 - int(row_meta[PROMPT_LEN, r])
        x = out[n].clone()
        applies = (state.entry_ids[slot] >= 0) & (state.entry_until[slot] > num_outputs)
        for token_id, value in zip(state.entry_ids[slot][applies], state.entry_values[slot][applies], strict=True):
            x = torch.where(ids == token_id, x + value, x)
        counts = (state.counts[slot] & MOST_OUTPUTS).long()
        counts.index_add_(0, drafted[:distance, r], torch.ones_like(drafted[:distance, r]))
        seen = ((state.counts[slot] < 0) | (counts > 0))[ids]
        repetition, presence, frequency = state.penalties[:, slot]
        x = torch.where(seen, torch.where(x < 0, x * repetition.float(), x / repetition.float()), x)
        change = -(presence + frequency * counts.double()).float()
        out[n] = torch.where(counts[ids] > 0, x + change[ids], x)


def count_outputs(
    row_meta: Tensor,
    starts: Tensor,
    positions: Tensor,
    following: Tensor,
    next_state: Tensor,
    counts: Tensor,
    drafted: Tensor | None = None,
) -> None:
    """Count the output tokens of a cycle, up to the token in `next_state` [2, R], in `counts` [S, V] int16 of the rows
    that have a slot. No two rows share one, so rows with a slot have no branches.

    With `drafted` [K, R] the accepted drafts are counted instead of what full depth chooses there, which differs for a
    row that accepts a draft without a comparison."""
    for r, (count, slot) in enumerate(row_meta[[DRAFTS, ADJUST_SLOT]].T.tolist()):
        if slot < 0 or count < 0:
            continue
        begin = int(starts[r])
        gained = int(next_state[1, r] - positions[begin])
        tokens = following[begin : begin + gained].clone()
        if drafted is not None:
            tokens[:-1] = drafted[: gained - 1, r]
        for token in tokens.tolist():
            if counts[slot, token] & MOST_OUTPUTS != MOST_OUTPUTS:
                counts[slot, token] += 1
