"""What a request asks to change about the model's logits before a token is chosen.

All changes are listed as (row, id, value) and applied with one gather and one scatter per kind, so the cost follows
the number of ids touched and not the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from tide_core.sampling.rows import SamplingRow

Change = tuple[int, int, float]  # row, token id, value


def needs_adjusting(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or row.mask is not None
        or len(row.output_ids) < params.min_tokens
        or params.repetition_penalty != 1.0
        or (row.output_ids and (params.presence_penalty or params.frequency_penalty))
    )


def adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Steps 2 to 6 of the sampler: float32 `logits` [R, V] as their rows ask for them; the input is not changed."""
    if not any(needs_adjusting(row) for row in rows):
        return logits
    logits = logits.clone()
    # 2. Logit bias.
    _add(logits, [(r, i, v) for r, row in enumerate(rows) for i, v in row.params.logit_bias.items()])
    # 3. Fewest tokens: nothing may end the text yet.
    _add(logits, [(r, i, -torch.inf) for r, row in enumerate(rows) for i in _ending_ids(row)])
    # 4. Repetition penalty, each distinct token of prompt and output once.
    _penalise_repetition(logits, rows)
    # 5. Presence and frequency penalties, over the output alone.
    _add(logits, [change for r, row in enumerate(rows) for change in _output_penalties(r, row)])
    # 6. Grammar: tokens that cannot follow.
    _mask(logits, rows)
    return logits


def _mask(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    for r, row in enumerate(rows):
        if row.mask is not None:
            allowed = torch.from_numpy(row.mask.allowed(row.output_ids)).to(logits.device, non_blocking=True)
            logits[r].masked_fill_(~allowed, -torch.inf)


def _ending_ids(row: SamplingRow) -> set[int]:
    if len(row.output_ids) >= row.params.min_tokens:
        return set()
    if row.mask is not None and row.mask.must_end(row.output_ids):
        return set()  # a grammar goes before fewest tokens
    # With ignore_eos an end-of-text id ends nothing, so there is no reason to keep it from being chosen.
    return {*row.params.stop_ids, *(() if row.params.ignore_eos else row.eos_ids)}


def _output_penalties(r: int, row: SamplingRow) -> Iterator[Change]:
    params = row.params
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(row.output_ids).items():
            yield r, token_id, -(params.presence_penalty + params.frequency_penalty * count)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    changes = [
        (r, token_id, row.params.repetition_penalty)
        for r, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for token_id in {*row.prompt_ids, *row.output_ids}
    ]
    if changes:
        where, penalty = _as_tensors(logits, changes)
        seen = logits[where]
        logits[where] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _add(logits: torch.Tensor, changes: Sequence[Change]) -> None:
    """Add to each (row, id); no pair comes twice."""
    if changes:
        where, values = _as_tensors(logits, changes)
        logits[where] += values


def _as_tensors(
    logits: torch.Tensor, changes: Sequence[Change]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    row_ids, token_ids, values = zip(*changes, strict=True)
    device = logits.device  # a copy that blocks would wait for all that the device has to do
    where = torch.tensor([row_ids, token_ids]).to(device, non_blocking=True)
    return (where[0], where[1]), torch.tensor(values, dtype=logits.dtype).to(device, non_blocking=True)
