"""A head's features at every distance to the last deep state, for whole sequences at once, equal to those of decoding.

A cycle drafts the positions t-j+1 .. t, j = 1 being the first, all with the deep state of position t-j as input. After
the deep pass, the keys and values of a block head are rewritten as if each position had been a first draft. So a draft
at position t and distance j attends to keys of distance 1 for the positions up to t-j+1, and to the keys of its own
chain for the rest: position t-j+i has the key of distance i.

Keys and values of a block depend on its input only, so no distance depends on the result of another: all chains of a
sequence are one dense computation, a causal attention shifted by j-1 plus j-1 keys of the chain. Positions that have no
deep state j positions back are in no chain; their features are finite and have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_core.exits.artefact.heads import ExitHead


def features_by_distance(
    head: ExitHead, states: Tensor, deep: Tensor, distances: Sequence[int], *, rows: Tensor | None = None
) -> dict[int, Tensor]:
    """Features [B * S, D] at each of the `distances`, from states at the checkpoint [B, S, D] and deep ones [B, S, d];
    with `rows` [N] only those of these positions of the flattened batch, [N, D].

    A head without the deep state as input does not depend on the distance: all distances share one result."""
    num_rows, length, _ = states.shape
    positions = torch.arange(length, device=states.device).repeat(num_rows)
    flat_states = states.flatten(0, 1)
    chosen = flat_states if rows is None else flat_states.index_select(0, rows)
    skipped = head.skip_norm(chosen) if head.spec.narrow else None
    attention, embedded_at = ChainAttention(num_rows, length), Embedded(head, states, deep, positions)
    features: dict[int, Tensor] = {}
    for distance in range(1, max(distances) + 1 if head.spec.deep else 2):
        if not head.spec.attends and head.spec.deep and distance not in distances:
            continue
        embedded = embedded_at(distance)
        if distance in distances or not head.spec.deep:
            refined = head.refine(embedded, positions, attention.attend, rows=rows)
            features[distance] = refined if skipped is None else skipped + head.up(refined)
        else:
            attention.append(*head.keys_values(embedded, positions))
    return features if head.spec.deep else dict.fromkeys(distances, features[1])


class Embedded:
    """What enters a head at each distance, [B * S, d] float32 whatever the dtype of the products.

    Products of states and of deep states are the same at every distance: they are made once and added up."""

    def __init__(self, head: ExitHead, states: Tensor, deep: Tensor, positions: Tensor) -> None:
        self._head, self._states, self._deep, self._positions = head, states, deep, positions
        self._addends = [part.float() for part in head.addends(states, deep)] if head.has_addends else None

    def __call__(self, distance: int) -> Tensor:
        has_deep = self._positions >= distance
        if self._addends is None:
            fed, known = shift(self._deep, distance).flatten(0, 1), torch.where(has_deep, distance, 0)
            return self._head.embed(self._states.flatten(0, 1), fed, known).float()
        mixed, fed, of_distance = self._addends
        farthest = self._head.spec.max_distance
        own = torch.where(has_deep.unsqueeze(-1), of_distance[min(distance, farthest)], of_distance[0])
        return (mixed + shift(fed, distance)).flatten(0, 1) + own


class ChainAttention:
    """The attention of a block head at distance 1, then 2, and so on: one call per distance."""

    def __init__(self, num_rows: int, length: int) -> None:
        self._num_rows, self._length = num_rows, length
        self._keys: list[Tensor] = []
        """By distance, [B, Hk, S, D] float32; values have the same shape."""
        self._values: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the keys and values [B * S, Hk, D] of the next distance."""
        self._keys.append(self._by_head(key))
        self._values.append(self._by_head(value))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [B * S, Hq, D], keys and values [B * S, Hk, D] of the next distance, to [B * S, Hq, D]."""
        self.append(key, value)
        with torch.autocast(query.device.type, enabled=False):
            attended = self._attend(self._by_head(query) * query.shape[-1] ** -0.5)
        return attended.transpose(1, 2).flatten(0, 1).to(query.dtype)

    def _attend(self, queries: Tensor) -> Tensor:
        """Scaled queries [B, Hq, S, D] of the latest distance to [B, Hq, S, D]."""
        distance, first_keys, first_values = len(self._keys), self._keys[0], self._values[0]
        num_rows, num_heads, length, size = queries.shape
        shared = num_heads // first_keys.shape[1]  # G query heads per KV head
        grouped = queries.view(num_rows, -1, shared, length, size)  # [B, Hk, G, S, D]
        scores = [grouped.flatten(2, 3) @ first_keys.transpose(-1, -2)]
        scores[0] = scores[0].view(*grouped.shape[:-1], -1).masked_fill(self._hidden(distance), float("-inf"))
        chain = [(step, distance - step) for step in range(2, distance + 1)]  # distance, positions back
        for step, back in chain:
            scores.append((grouped * shift(self._keys[step - 1], back).unsqueeze(2)).sum(-1, keepdim=True))
        weights = torch.cat(scores, -1).softmax(-1)
        attended = (weights[..., : self._length].flatten(2, 3) @ first_values).view_as(grouped)
        for column, (step, back) in enumerate(chain, self._length):
            attended = attended + weights[..., column, None] * shift(self._values[step - 1], back).unsqueeze(2)
        return attended.flatten(1, 2)

    def _hidden(self, distance: int) -> Tensor:
        """[S, S]: True where the key of distance 1 is masked at this distance."""
        square = torch.ones(self._length, self._length, dtype=torch.bool, device=self._keys[0].device)
        return square.triu(2 - distance)

    def _by_head(self, tokens: Tensor) -> Tensor:
        """[B * S, H, D] to [B, H, S, D] in float32."""
        return tokens.view(self._num_rows, self._length, *tokens.shape[1:]).transpose(1, 2).float()


def shift(values: Tensor, by: int) -> Tensor:
    """[..., S, D] shifted right by `by` positions; zeros fill the start."""
    return F.pad(values, (0, 0, by, 0))[..., : values.shape[-2], :] if by else values
