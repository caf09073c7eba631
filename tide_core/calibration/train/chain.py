"""A head's features at every distance to the last deep state, for whole sequences at once, as decoding will see them.

A cycle drafts the positions t-j+1 .. t, j = 1 being the first, all fed with the deep state of position t-j. After the
deep pass, what a block head keeps of a position is rewritten as if it had been a first draft. So a draft at position t
and distance j attends to keys made at distance 1 for the positions up to t-j+1, and to those of its own chain for the
rest: position t-j+i holds what was made at distance i.

What a block keeps is made from what enters it, so no distance waits for another's result: all of a sequence's chains
are one dense computation, a causal one shifted by j-1, with j-1 keys of the chain beside it. Positions so early that
there is no deep state j positions back are in no chain; what comes out there is finite and means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_core.exits.artefact.heads import ExitHead


def features_by_distance(head: ExitHead, states: Tensor, deep: Tensor, distances: Sequence[int]) -> dict[int, Tensor]:
    """Features [B * S, D] at each of the `distances`, from the states at the checkpoint and the deep ones, [B, S, D].

    A head that is not fed with the deep state knows no distance: one result stands for all."""
    num_rows, length, _ = states.shape
    positions = torch.arange(length, device=states.device)
    flat_positions, flat_states = positions.repeat(num_rows), states.flatten(0, 1)
    attention = ChainAttention(num_rows, length)
    features: dict[int, Tensor] = {}
    for distance in range(1, max(distances) + 1 if head.spec.deep else 2):
        if not head.spec.attends and head.spec.deep and distance not in distances:
            continue
        fed = shift(deep, distance).flatten(0, 1)
        known = torch.where(flat_positions >= distance, distance, 0)
        embedded = head.embed(flat_states, fed, known).float()  # whatever the dtype of the products
        if distance in distances or not head.spec.deep:
            features[distance] = head.refine(embedded, flat_positions, attention.attend)
        else:
            attention.keep(*head.keys_values(embedded, flat_positions))
    return features if head.spec.deep else dict.fromkeys(distances, features[1])


class ChainAttention:
    """The attention of a block head at distance 1, then 2, and so on: one call for each."""

    def __init__(self, num_rows: int, length: int) -> None:
        self._num_rows, self._length = num_rows, length
        self._keys: list[Tensor] = []
        """By distance, [B, Hk, S, D] float32, as the values."""
        self._values: list[Tensor] = []

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Keys and values [B * S, Hk, D] of the next distance."""
        self._keys.append(self._by_head(key))
        self._values.append(self._by_head(value))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [B * S, Hq, D], keys and values [B * S, Hk, D] of the next distance, to [B * S, Hq, D]."""
        self.keep(key, value)
        with torch.autocast(query.device.type, enabled=False):
            attended = self._attend(self._by_head(query) * query.shape[-1] ** -0.5)
        return attended.transpose(1, 2).flatten(0, 1).to(query.dtype)

    def _attend(self, queries: Tensor) -> Tensor:
        """Scaled queries [B, Hq, S, D] of the latest distance to [B, Hq, S, D]."""
        distance, settled_keys, settled_values = len(self._keys), self._keys[0], self._values[0]
        num_rows, num_heads, length, size = queries.shape
        shared = num_heads // settled_keys.shape[1]  # G query heads to one KV head
        grouped = queries.view(num_rows, -1, shared, length, size)  # [B, Hk, G, S, D]
        scores = [grouped.flatten(2, 3) @ settled_keys.transpose(-1, -2)]
        scores[0] = scores[0].view(*grouped.shape[:-1], -1).masked_fill(self._hidden(distance), float("-inf"))
        chain = [(step, distance - step) for step in range(2, distance + 1)]  # made at `step`, that many positions back
        for step, back in chain:
            scores.append((grouped * shift(self._keys[step - 1], back).unsqueeze(2)).sum(-1, keepdim=True))
        weights = torch.cat(scores, -1).softmax(-1)
        settled = weights[..., : self._length].flatten(2, 3) @ settled_values
        attended = settled.view_as(grouped)
        for column, (step, back) in enumerate(chain, self._length):
            attended = attended + weights[..., column, None] * shift(self._values[step - 1], back).unsqueeze(2)
        return attended.flatten(1, 2)

    def _hidden(self, distance: int) -> Tensor:
        """[S, S]: whether a position's settled key, made at distance 1, is out of sight at this distance."""
        square = torch.ones(self._length, self._length, dtype=torch.bool, device=self._keys[0].device)
        return square.triu(2 - distance)

    def _by_head(self, tokens: Tensor) -> Tensor:
        """[B * S, H, D] to [B, H, S, D] in float32."""
        return tokens.view(self._num_rows, self._length, *tokens.shape[1:]).transpose(1, 2).float()


def shift(values: Tensor, by: int) -> Tensor:
    """[..., S, D] moved `by` positions on; zeros come in."""
    return F.pad(values, (0, 0, by, 0))[..., : values.shape[-2], :] if by else values
