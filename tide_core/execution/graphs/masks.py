"""Grammars in a cycle, which the host evaluates.

A greedy row runs as if it had none. When its tokens are read, the grammar is asked about them (`obeyed`): most fit,
which costs microseconds where a mask costs as much as a step of a small model. In place of the first that does not
comes the likeliest token that may stand there, by the list of the likeliest ones that the cycle returns. That is what a
mask would have left as the largest logit. A cycle that was launched ahead with the other token is lost for this row, so
such rows are launched ahead only while few tokens do not fit (`fits_mostly`).

Other rows need masks (`needs_mask`): the tokens that may follow each token of the deep pass. The mask after a draft
depends on all drafts before it. So a cycle with such rows has three graphs: drafts, the deep pass, and the choice of
tokens. While the deep pass runs, the host reads the drafts and computes the masks for the choice. Drafts are made
without a mask. One that the grammar forbids is rejected, because the mask keeps full depth from choosing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch

from tide_core.batch import NOT_READY, RowResult, RowStep
from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace
from tide_core.request import TokenMask

Likeliest = tuple[Iterable[int], Iterable[float]]
WORD = 32
FADES = 0.9
"""What a token leaves of the share of misfits before it."""
MOST_MISFITS = 0.15
ALL = -1
"""A word whose bits are all set: all of its tokens are allowed."""


def needs_mask(row: RowStep) -> bool:
    """Whether the grammar of a row must be known before its next token is chosen: a sample is drawn from what it
    allows, penalties and a budget compare what it allows, and after some tokens none of the likeliest fits."""
    request = row.request
    if request.mask is None:
        return False
    usual = request.params.is_greedy and not request.adjusts_logits and row.policy.budget is None
    return not usual or request.mask.masked_at == len(row.output_ids)


def fits_mostly(rows: Sequence[RowStep]) -> bool:
    """Whether to launch ahead: every token that does not fit costs its row a cycle, and not to launch ahead costs all
    rows the time of the host."""
    misfits = [row.request.mask.misfits for row in rows if row.request.mask is not None]
    return sum(misfits) <= MOST_MISFITS * len(rows)


def obeyed(row: RowStep, result: RowResult, likeliest: Callable[[int], Likeliest], num_layers: int) -> RowResult:
    """The tokens of a greedy row that its grammar allows, with the likeliest allowed one in place of the first that it
    forbids. `likeliest` gives the ids and log-probabilities of the likeliest tokens at one of the result's, best first.

    If none of them fits, the next step of the row needs a mask."""
    mask, ids = row.request.mask, result.token_ids
    assert mask is not None
    fitting = mask.num_fitting(row.output_ids, ids)
    mask.misfits *= FADES**fitting
    if fitting == len(ids):
        return result
    mask.misfits = FADES * mask.misfits + 1 - FADES
    allowed = mask.allowed([*row.output_ids, *ids[:fitting]])
    for token_id, logprob in zip(*likeliest(fitting), strict=True):
        if allowed[token_id] and logprob > -inf:
            return _with_last(result.first(fitting + 1), int(token_id), float(logprob), num_layers)
    mask.masked_at = len(row.output_ids) + fitting
    return result.first(fitting) if fitting else NOT_READY


def _with_last(result: RowResult, token_id: int, logprob: float, num_layers: int) -> RowResult:
    """With another last token, which full depth has chosen."""
    *before, last = result.counts
    gained = len(result.token_ids) - sum([counts.accepted + 1 for counts in before])
    return result._replace(
        token_ids=(*result.token_ids[:-1], token_id),
        exit_layers=(*result.exit_layers[:-1], num_layers),
        counts=(*before, last._replace(accepted=gained - 1)),
        notes=result.notes and (*result.notes[:-1], result.notes[-1]._replace(logprob=logprob)),
    )


class MaskBuffer:
    """The masks of the cycles of one shape, on the host and on the device: a bit for every token of the vocabulary, for
    every token of the deep pass."""

    def __init__(self, shape: CycleShape, vocab_size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        size = shape.tokens, -(-vocab_size // WORD)
        self._host = torch.full(size, ALL, dtype=torch.int32, pin_memory=on_gpu)
        self._device = self._host.to(device)
        self._words = self._host.numpy()
        self._num_written = 0
        """Number of masks, from the first on, that an earlier cycle may have changed."""
        every = torch.arange(vocab_size, device=device)
        self._word_of, self._bit_of = every // WORD, (every % WORD).int()
        self._drafted = torch.zeros((shape.drafts, shape.rows), dtype=torch.int64, pin_memory=on_gpu)
        self._fetched: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fetch(self, drafted: torch.Tensor) -> None:
        """Start the copy of the drafts [K, R] to the host. `send` waits for it."""
        self._drafted.copy_(drafted, non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()

    def send(self, rows: Sequence[RowPlace], begins: Sequence[int]) -> None:
        """Compute the masks after the newest token of each row and after its drafts, and copy them to the device.
        `begins` is the index of each row's newest token in the deep pass."""
        words = self._words
        words[: self._num_written] = ALL
        self._num_written = begins[-1] + rows[-1].drafts + 1
        followed: list[tuple[int, TokenMask]] = []
        for place, row in enumerate(rows):  # while the drafts are made
            grammar = row.step.request.mask
            if grammar is not None:
                grammar.write(row.step.output_ids, words[begins[place]])
                followed.append((place, grammar))
        if self._fetched is not None:
            self._fetched.synchronize()
        drafted = self._drafted.T.tolist()
        for place, grammar in followed:  # while the deep pass runs
            step, begin = rows[place].step, begins[place]
            output_ids = list(step.output_ids)
            for distance, draft in enumerate(drafted[place][: rows[place].drafts]):
                is_allowed = words[begin + distance, draft // WORD] >> draft % WORD & 1
                if not is_allowed or draft in step.request.end_ids:
                    break
                output_ids.append(draft)
                grammar.write(output_ids, words[begin + distance + 1])
        self._device.copy_(self._host, non_blocking=True)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the deep pass [T, V], with -inf for tokens that the masks forbid."""
        allowed = self._device.index_select(1, self._word_of).bitwise_right_shift_(self._bit_of).bitwise_and_(1)
        return logits.masked_fill(allowed == 0, -torch.inf)
