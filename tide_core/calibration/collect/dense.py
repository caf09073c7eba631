"""KV of a batch of sequences as dense tensors, and the views of it that layers are handed: for prompts and for steps.

Slots of a row are its positions, so nothing is padded on the left. What lies past a row's position is never seen: a
shorter prompt leaves something there, and its own next tokens overwrite it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Pools = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, H, slots, size]."""


def make_pools(layouts: Sequence[tuple[int, int, int]], rows: int, slots: int, like: Tensor) -> Pools:
    """Zeros: a slot that is masked has weight 0, and 0 times whatever memory held may be no number."""
    return [
        (like.new_zeros(rows, heads, slots, key_size), like.new_zeros(rows, heads, slots, value_size))
        for heads, key_size, value_size in layouts
    ]


class PromptView:
    """R rows from `first` on, P tokens of each from its beginning, row after row."""

    write_only = False

    def __init__(self, pools: Pools, first: int, rows: int, tokens: int) -> None:
        self._pools, self._first, self._rows, self._tokens = pools, first, rows, tokens

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for pool, new in zip(self._pools[layer], (key, value), strict=True):
            pool[self._first : self._first + self._rows, :, : self._tokens] = self._by_row(new)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        positions = torch.arange(self._tokens, device=query.device)
        past = positions[:, None] - positions
        seen = (past >= 0) & (past < window) if window else past >= 0
        plain = not window or window >= self._tokens
        query, key, value = (self._by_row(tensor) for tensor in (query, key, value))
        out = attention(query, key, value, None if plain and not softcap else seen, scaling, softcap)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)

    def _by_row(self, tensor: Tensor) -> Tensor:
        """[1, H, R * P, D] -> [R, H, P, D]"""
        return tensor.reshape(tensor.shape[1], self._rows, self._tokens, -1).transpose(0, 1)


class StepView:
    """One token of every row, at `positions` [B], over the first `slots` slots, which must hold all of them."""

    write_only = False

    def __init__(self, pools: Pools, positions: Tensor, slots: int) -> None:
        self._pools, self._positions, self._slots = pools, positions, slots
        self._rows = torch.arange(len(positions), device=positions.device)
        self._seen: dict[int, Tensor] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for pool, new in zip(self._pools[layer], (key, value), strict=True):
            pool[self._rows, :, self._positions] = new[0].transpose(0, 1)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        keys, values = (pool[:, :, : self._slots] for pool in self._pools[layer])
        # Query heads that share a KV head stand where several query positions would: nothing is repeated in memory.
        grouped = query[0].transpose(0, 1).reshape(*keys.shape[:2], -1, query.shape[-1])
        out = attention(grouped, keys, values, self._mask(window), scaling, softcap)
        return out.flatten(1, 2).unsqueeze(0)

    def _mask(self, window: int) -> Tensor:
        """Slots that each row sees, [B, 1, 1, slots]."""
        if window not in self._seen:
            past = self._positions[:, None] - torch.arange(self._slots, device=self._positions.device)
            seen = (past >= 0) & (past < window) if window else past >= 0
            self._seen[window] = seen[:, None, None]
        return self._seen[window]


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """[B, Hq, Q, D] over [B, Hk, K, D]; `seen` broadcasts to [B, Hq, Q, K], None is causal."""
    shared = query.shape[1] != key.shape[1]
    if not softcap:
        causal = seen is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=causal, scale=scaling, enable_gqa=shared
        )
    assert seen is not None, "capped scores need a mask"
    if shared:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = torch.tanh((query @ key.transpose(-1, -2)) * scaling / softcap) * softcap
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value
