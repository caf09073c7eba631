"""From logits to whole-number weights of the tokens a draw may choose.

Weights are int64 and not floats for one reason: sums of integers do not depend on their order. However a device
splits a cumulative sum over a row, and however many rows share the batch, the draw is the same to the last bit.
The likeliest token weighs `2**(62 - bits of V)`, so no sum overflows; at V = 49152 a token 10**-14 as likely as the
likeliest one still has a weight.

Tokens rank by logit, and equal logits by lower id. What top-k and top-p keep is a head of that ranking, so it is
enough to find how many tokens are kept and the logit of the last of them; the vocabulary is rarely sorted whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide_core.request import SamplingParams

HEAD_TOKENS = 1024
"""Tokens sorted at first for a top-p without top-k; a row whose mass lies deeper is sorted whole."""


def token_weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Steps 8 to 11 of the sampler: [R, V] finite-maximum float32 logits to int64 weights, 0 for what is dropped."""
    vocab_size = logits.shape[-1]
    # 7. Temperature. The maximum goes first: however cold, it stays at 0 and nothing becomes inf - inf.
    coldest = torch.finfo(torch.float32).tiny  # a smaller number would be 0 in float32, and 0 / 0 at the maximum
    temperature = _column(logits, [max(p.temperature, coldest) for p in params])
    share = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()  # of the likeliest token's probability
    weights = (share.double() * 2.0 ** (62 - vocab_size.bit_length())).long()
    # 8, 9. Top-k, then top-p over what it leaves.
    filtered = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if filtered:
        chosen = [params[r] for r in filtered]
        kept = select_rows(weights, filtered)
        kept = kept * _head(select_rows(logits, filtered), kept, [p.top_k for p in chosen], [p.top_p for p in chosen])
        weights = kept if len(kept) == len(weights) else weights.index_copy(0, _index(weights, filtered), kept)
    # 10. Min-p.
    if any(p.min_p > 0.0 for p in params):
        weights = weights.masked_fill(share < _column(logits, [p.min_p for p in params]), 0)
    return weights


def select_rows(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of [R, V] by number, in ascending order; the table itself, not a copy, when that is all of them."""
    return table if len(rows) == len(table) else table.index_select(0, _index(table, rows))


def _head(logits: torch.Tensor, weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Mask [R, V] of the tokens that top-k and top-p keep; at least one in each row."""
    vocab_size = logits.shape[-1]
    limit = torch.tensor([[k or vocab_size] for k in top_k], device=logits.device).clamp(max=vocab_size)
    width = min(vocab_size, max(k or HEAD_TOKENS for k in top_k))
    while True:
        # Equal logits may come in any order here: their weights are equal too, so the sums are not changed by it.
        values, ids = logits.topk(width, dim=-1)
        in_limit = torch.arange(width, device=logits.device) < limit
        mass = weights.gather(-1, ids) * in_limit
        reached = mass.cumsum(-1)
        total = torch.where(limit > width, weights.sum(-1, keepdim=True), reached[:, -1:])
        needed = (total.double() * _column(logits, top_p, torch.float64)).ceil().long().clamp(min=1).minimum(total)
        if width == vocab_size or bool((reached[:, -1:] >= needed).all()):
            break
        width = vocab_size
    # A token is kept while those before it do not reach the mass.
    num_kept = ((reached - mass < needed) & in_limit).sum(-1, keepdim=True)
    last = values.gather(-1, num_kept - 1)
    num_equal = num_kept - (values > last).sum(-1, keepdim=True)
    equal = logits == last
    return (logits > last) | (equal & (equal.cumsum(-1) <= num_equal))


def _index(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, device=table.device)


def _column(logits: torch.Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(-1)
