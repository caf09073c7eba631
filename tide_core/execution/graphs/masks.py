"""Grammars in a cycle, which the host evaluates.

A mask holds the tokens that may follow each token of the deep pass. The mask after a draft depends on all drafts before
it. So a cycle with masks has three graphs: drafts, the deep pass, and the choice of tokens. The first two need no
grammar and are launched ahead, as whole cycles without masks are. Once the step before is read, the host computes the
masks, while the deep pass runs, and launches the choice. Drafts are made without a mask. One that the grammar forbids
is rejected, because the mask keeps full depth from choosing it.

Most tokens of a greedy row fit its grammar as they are. Such a row runs without a mask, and its tokens are checked when
they are read (`obeyed`), which costs microseconds where a mask costs tens of them. In place of the first token that
does not fit comes the likeliest that does, by the list of the likeliest ones that the cycle returns: a mask would have
left it as the largest logit. But the step that was launched ahead with the other token is lost for this row. So a row
has masks at its beginning and after a token that did not fit, until most fit again (`needs_mask`), and as far as they
are ready before the deep pass ends: the device does not wait for masks that can be done without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch

from tide_core.batch import NOT_READY, RowResult, RowStep
from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace
from tide_core.request import TokenMask

Likeliest = tuple[Sequence[int], Sequence[float]]
WORD = 32
FADES = 0.9
"""What a token leaves of the share of misfits before it."""
MOST_MISFITS = 0.1
"""Share of tokens that do not fit, up to which a greedy row runs without a mask: each one loses it a step."""
ALL = -1
"""A word whose bits are all set: all of its tokens are allowed."""


def checks_tokens(row: RowStep) -> bool:
    """Whether a row with a grammar can run without a mask. A sample is drawn from what the grammar allows; penalties
    and a budget compare what it allows."""
    request = row.request
    usual = request.params.is_greedy and not request.adjusts_logits and row.policy.budget is None
    return request.mask is not None and usual


def needs_mask(row: RowStep) -> bool:
    """Whether what a row's grammar allows must be known before its next token is chosen."""
    mask = row.request.mask
    if mask is None:
        return False
    return mask.misfits > MOST_MISFITS or must_have_mask(row)


def must_have_mask(row: RowStep) -> bool:
    """Whether a row that needs a mask gets no token without."""
    mask = row.request.mask
    return not checks_tokens(row) or (mask is not None and mask.masked_at == len(row.output_ids))


def observe_masked(row: RowStep, result: RowResult, likeliest: Callable[[int], Likeliest]) -> None:
    """Note which tokens of a row that had a mask would have fitted without."""
    mask = row.request.mask
    assert mask is not None
    for index, token_id in enumerate(result.token_ids):
        fits = likeliest(index)[0][0] == token_id
        mask.misfits = FADES * mask.misfits + (0.0 if fits else 1 - FADES)


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
        self._vocab_size = vocab_size
        bits = *(1 << bit for bit in range(WORD - 1)), -(1 << WORD - 1)
        self._bits = torch.tensor(bits, dtype=torch.int32, device=device)
        self._drafted = torch.zeros((shape.drafts, shape.rows), dtype=torch.int64, pin_memory=on_gpu)
        self._fetched: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.waited_s = 0.0
        """That the last `send` waited for the device to make drafts."""

    def fetch(self, drafted: torch.Tensor) -> None:
        """Start the copy of the drafts [K, R] to the host. `send` waits for it."""
        self._drafted.copy_(drafted, non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()

    def send(
        self,
        places: Sequence[RowPlace],
        begins: Sequence[int],
        rows: Mapping[int, RowStep],
        is_late: Callable[[], bool] = lambda: False,
    ) -> set[int]:
        """Compute the masks after the newest token of some rows and after their drafts, and copy them to the device.
        `begins` is the index of each place's newest token in the deep pass, `rows` the rows by their place. Once it is
        late, rows that can do without get no more masks. Returns the places that have all of theirs."""
        words = self._words
        words[: self._num_written] = ALL
        self._num_written = begins[-1] + places[-1].drafts + 1
        followed: list[tuple[int, RowStep, TokenMask, bool]] = []
        for place, row in rows.items():  # while the drafts are made
            grammar, must_have = row.request.mask, must_have_mask(row)
            assert grammar is not None
            if must_have or not is_late():
                grammar.write(row.output_ids, words[begins[place]])
                followed.append((place, row, grammar, must_have))
        before = time.perf_counter()
        if self._fetched is not None:
            self._fetched.synchronize()
        self.waited_s = time.perf_counter() - before
        drafted = self._drafted.T.tolist()
        complete = set()
        for place, row, grammar, must_have in followed:  # while the deep pass runs
            begin, drafts = begins[place], drafted[place][: places[place].drafts]
            for distance, draft in enumerate(drafts):
                is_allowed = words[begin + distance, draft // WORD] >> draft % WORD & 1
                if not is_allowed or draft in row.request.end_ids:
                    complete.add(place)
                    break
                if not must_have and is_late():
                    break
                grammar.write(row.output_ids, words[begin + distance + 1], drafts[: distance + 1])
            else:
                complete.add(place)
        self._device.copy_(self._host, non_blocking=True)
        return complete

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the deep pass [T, V], with -inf for tokens that the masks forbid."""
        is_forbidden = torch.bitwise_and(self._device.unsqueeze(-1), self._bits) == 0
        return logits.masked_fill(is_forbidden.flatten(1)[:, : self._vocab_size], -torch.inf)
