"""One random number per (seed, step), and the token it falls on.

The number is a hash of seed and step, for a draft also of its distance, not the next one of a stream: there is no state
to keep, so a row that is preempted, recomputed or moved in the batch draws what it would have drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3
"""Further streams of random numbers; stream 0 is plain sampling: to draw a draft, accept it, replace it."""
DISTANCE_BITS = 32
"""Where the distance stands above the step."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, step: int, stream: int = 0, distance: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. Every seed in -2**63..2**64-1 has numbers of its own, in every stream and
    at every distance of a draft: numbers of drafts that were discarded are not used again."""
    return (_mix(stream_key(seed, stream) + step + (distance << DISTANCE_BITS)) >> 11) * 2.0**-53


@functools.lru_cache(maxsize=4096)
def stream_key(seed: int, stream: int = 0) -> int:
    """Where the numbers of a stream begin, in 0..2**64-1. Asked once for every token, so the last ones are kept."""
    key = _mix(seed & _MASK)
    key = _mix(key + (seed >> 64 & _MASK))  # tells -1 from 2**64 - 1
    return _mix(key ^ stream * _GOLDEN & _MASK) if stream else key


def draw(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Inverse CDF in id order: [R, V] int64 weights, no row all 0, and one number in [0, 1) per row, to ids [R]."""
    reached = weights.cumsum(-1)
    point = reached[:, -1:].double() * torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(-1)
    # No number is above 1 - 2**-53, so the point is at most the float64 before the total's own, and that is below the
    # total whichever way it was rounded. The first sum above the point belongs to a token of weight 1 or more, as a sum
    # does not grow on a token of weight 0.
    return torch.searchsorted(reached, point.long(), right=True).squeeze(-1)


def _mix(word: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014): every bit of the word reaches every bit of the result."""
    word = (word + _GOLDEN) & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
