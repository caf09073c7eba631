"""Tokens drawn at random without asking the host, in plain Torch; on a GPU each function is one launch.

`draw` is steps 8 to 12 of `tide_core.sampling.sampler`, and `verify_drawn` the rejection rule of
`tide_core.exits.verify`, on tensors alone: the same whole-number weights, the same ranking, the same numbers. A row
without a temperature gets its largest logit, the lowest id among equals.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tide_core.kernels.reference.cycle import DRAFTS, PROMPT_LEN

MOST_VOCABULARY = 2**20
TEMPERATURE, TOP_K, TOP_P, MIN_P, LEAST = range(5)
"""Settings of a row: how it draws, and the least score at which a draft counts."""
NUM_SETTINGS = 5
BEST, CUT, LAST, TOTAL = range(4)
"""What a token was drawn from: the largest logit; the smallest that top-k and top-p keep, and the last place at which
they keep it; and the sum of the weights."""
NUM_HEAD = 4
NUM_STREAMS, DRAFT_INDEX = 4, 1
"""Streams of random numbers that a row has, and the one that drafts are drawn with."""
DISTANCE_BITS = 32
"""As in `tide_core.sampling.draw`."""
Out = tuple[Tensor, Tensor]
"""Where the results go."""


class DrawnCycle(NamedTuple):
    """What `verify_drawn` reads next to logits: R rows, K drafts of each, T tokens, V in the vocabulary, S in the
    shortlist."""

    sources: Tensor
    """[T] int64: draft * R + row."""
    num_tokens: Tensor
    """[1] int32: the tokens that belong to rows."""
    counts: Tensor
    """[R] int32: drafts of each row that may count."""
    settings: Tensor
    """[5, R] float64"""
    plain: Tensor
    """[K + 1, R] float64 in [0, 1): to draw after a token that no draft follows."""
    accept: Tensor
    """[K, R] float64 in [0, 1)"""
    residual: Tensor
    """[K, R] float64 in [0, 1): to draw what comes instead of a draft."""
    scores: Tensor
    """[K, R] float32"""
    draft_ids: Tensor
    """[K, R] int64"""
    draft_logits: Tensor
    """[K or fewer, R, S], of the dtype of the logits."""
    draft_heads: Tensor
    """[K, R, 4] float64, as `draw` made them; a sum of 0 for a suffix draft, which has a chance of 1."""
    places: Tensor
    """[V] int32: where a token stands in the shortlist, -1 where it does not."""


def draw(logits: Tensor, settings: Tensor, numbers: Tensor, vocab_size: int, *, out: Out | None = None) -> Out:
    """A place in each row of `logits` [R, W] by its `settings` [5, R] and one of `numbers` [R], and what it was drawn
    from, [R, 4]. Columns stand for rising tokens of a vocabulary, maybe not for all: its size scales the weights."""
    wide = logits.float()
    best, chosen = wide.max(-1)
    drawn = (settings[TEMPERATURE] > 0) & best.isfinite()
    shares = _shares(torch.where(drawn[:, None], wide, 0.0), settings)
    weights = _weights(shares, vocab_size)
    cut, last = _head(torch.where(drawn[:, None], wide, 0.0), weights, settings, vocab_size)
    weights = weights * _kept(wide, cut, last) * (shares >= settings[MIN_P].float()[:, None])
    weights = torch.where(drawn[:, None], weights, 1)
    places = torch.where(drawn, _inverse_cdf(weights, numbers), chosen)
    total = torch.where(drawn, weights.sum(-1), 0)
    cut, last = torch.where(drawn, cut, -torch.inf), torch.where(drawn, last, wide.shape[1])
    heads = torch.stack((best.double(), cut.double(), last.double(), total.double()), -1)
    return _put(out, places, heads)


def verify_drawn(logits: Tensor, cycle: DrawnCycle, *, out: Out | None = None) -> Out:
    """The largest of each row of `logits` [T, V] at full depth, [T] float32, and the token to output there, [T]: the
    draft that follows, if it is accepted, and never that draft if it is not. Tokens of no row have zeros."""
    num_tokens, vocab_size = logits.shape
    num_rows = cycle.settings.shape[1]
    draft_index, row = cycle.sources // num_rows, cycle.sources % num_rows
    settings = cycle.settings[:, row]
    tokens, heads = draw(logits, settings, cycle.plain.flatten()[cycle.sources], vocab_size)
    drawn = (settings[TEMPERATURE] > 0) & heads[:, BEST].isfinite()
    [verified] = torch.nonzero(drawn & _drafted(cycle, draft_index, row), as_tuple=True)
    if len(verified):
        source, own = cycle.sources[verified], settings[:, verified]
        full = _chances(logits[verified], heads[verified], own, vocab_size)
        drafts = cycle.draft_ids.flatten()[source]
        proposed = torch.nn.functional.one_hot(drafts, vocab_size).double()
        draft_heads = cycle.draft_heads.flatten(0, 1)[source]
        [by_exit] = torch.nonzero(draft_heads[:, TOTAL] > 0, as_tuple=True)
        if len(by_exit):
            chances = _chances(
                cycle.draft_logits.flatten(0, 1)[source[by_exit]], draft_heads[by_exit], own[:, by_exit], vocab_size
            )
            proposed[by_exit] = 0.0
            proposed[by_exit[:, None], torch.nonzero(cycle.places >= 0, as_tuple=True)[0]] = chances
        p, q = (chances.gather(-1, drafts[:, None])[:, 0] for chances in (full, proposed))
        rest = (full - proposed).clamp(min=0.0)
        most = rest.amax(-1)
        stays = (cycle.accept.flatten()[source] * q < p) | (most <= 0.0)
        # Where the draft is accepted the residual is not used, but it must not be empty.
        rest = torch.where(stays[:, None], 1.0, rest / torch.where(stays, 1.0, most)[:, None])
        others = _inverse_cdf(_weights(rest, vocab_size), cycle.residual.flatten()[source])
        tokens[verified] = torch.where(stays, drafts, others)
    exists = torch.arange(num_tokens, device=logits.device) < cycle.num_tokens
    return _put(out, torch.where(exists, heads[:, BEST].float(), 0.0), torch.where(exists, tokens, 0))


def _put(out: Out | None, *found: Tensor) -> Out:
    first, second = found if out is None else (to.copy_(part) for to, part in zip(out, found, strict=True))
    return first, second


def draw_numbers(keys: Tensor, starts: Tensor, positions: Tensor, row_meta: Tensor, out: Tensor) -> None:
    """The random numbers of a cycle: `tide_core.sampling.draw.uniform` of the streams with these `keys` [4, R] (int64
    with the bits of the unsigned keys), into `out` [4, K + 1, R] float64. The step at a distance is the number of
    output tokens there: those of the row so far and as many drafts. A draft's number depends on its distance as well.
    Zeros where there is no row."""
    exists = row_meta[DRAFTS] >= 0
    begins = torch.where(exists, starts[:-1], 0).long()
    outputs = positions[begins] + 1 - row_meta[PROMPT_LEN]
    distances = torch.arange(out.shape[1], device=out.device)[:, None]
    steps = (outputs + distances).expand(NUM_STREAMS, -1, -1).clone()
    steps[DRAFT_INDEX] += distances << DISTANCE_BITS
    word = keys[:, None] + steps + _signed(0x9E3779B97F4A7C15)  # wraps round, as the products do
    word = (word ^ _shifted(word, 30)) * _signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shifted(word, 27)) * _signed(0x94D049BB133111EB)
    word = word ^ _shifted(word, 31)
    out[:] = torch.where(exists, _shifted(word, 11).double() * 2.0**-53, 0.0)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(word: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    shifted: Tensor = (word >> by) & (2 ** (64 - by) - 1)
    return shifted


def places_of(shortlist: Tensor, vocab_size: int) -> Tensor:
    """Where each token of the vocabulary stands in the shortlist [S], -1 where it does not: [V] int32."""
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=shortlist.device)
    places[shortlist] = torch.arange(len(shortlist), dtype=torch.int32, device=shortlist.device)
    return places


def _drafted(cycle: DrawnCycle, draft_index: Tensor, row: Tensor) -> Tensor:
    """[T] whether a draft follows: every score up to it is a number, and high enough."""
    counts = cycle.scores.isfinite() & (cycle.scores.double() >= cycle.settings[LEAST])
    sound = torch.nn.functional.pad(counts.long().cumprod(0), (0, 0, 0, 1))  # there is none after the last draft
    return (sound[draft_index, row] > 0) & (draft_index < cycle.counts[row])


def _shares(wide: Tensor, settings: Tensor, best: Tensor | None = None) -> Tensor:
    """Of the likeliest token's probability, [R, W] float32."""
    best = wide.amax(-1) if best is None else best
    temperature = settings[TEMPERATURE].float().clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide - best[:, None]) / temperature[:, None]).exp()


def _weights(shares: Tensor, vocab_size: int) -> Tensor:
    return (shares.double() * 2.0 ** (62 - vocab_size.bit_length())).long()


def _head(wide: Tensor, weights: Tensor, settings: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Where the head ends that top-k and top-p keep: its smallest logit and the last place of that, [R] each."""
    width = wide.shape[1]
    top_k, top_p = settings[TOP_K].long(), settings[TOP_P]
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)
    order = wide.argsort(dim=-1, descending=True, stable=True)
    in_limit = torch.arange(width, device=wide.device) < torch.where(top_k > 0, top_k, width)[:, None]
    mass = weights.gather(-1, order) * in_limit
    reached = mass.cumsum(-1)
    total = reached[:, -1]
    needed = (total.double() * top_p).ceil().long().clamp(min=1).minimum(total)
    num_kept = ((reached - mass < needed[:, None]) & in_limit).sum(-1).clamp(min=1)
    last = order.gather(-1, num_kept[:, None] - 1)
    cut = wide.gather(-1, last)[:, 0]
    return torch.where(filtered, cut, -torch.inf), torch.where(filtered, last[:, 0], width)


def _kept(wide: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    places = torch.arange(wide.shape[1], device=wide.device)
    return (wide > cut[:, None]) | ((wide == cut[:, None]) & (places <= last[:, None]))


def _chances(logits: Tensor, heads: Tensor, settings: Tensor, vocab_size: int) -> Tensor:
    """The distributions [R, W] float64 that tokens were drawn from."""
    wide = logits.float()
    shares = _shares(wide, settings, heads[:, BEST].float())
    kept = _kept(wide, heads[:, CUT].float(), heads[:, LAST]) & (shares >= settings[MIN_P].float()[:, None])
    return (_weights(shares, vocab_size) * kept).double() / heads[:, TOTAL, None]


def _inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """See `tide_core.sampling.draw.draw`."""
    reached = weights.cumsum(-1)
    point = (reached[:, -1:].double() * numbers[:, None]).long()
    return torch.searchsorted(reached, point, right=True).squeeze(-1)
