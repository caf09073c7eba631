"""Find the shape of K and V that each layer caches per token: run one token and record the writes."""

from __future__ import annotations

from typing import Any

import torch

from tide_core.models.adapter import ModelAdapter


class LayoutProbe:
    """A stand-in for a KV view. Records the shapes of K and V, and attends over them without a cache."""

    write_only = False

    def __init__(self, device: torch.device) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.positions = torch.zeros(1, dtype=torch.long, device=device)
        self.context_positions = self.positions
        self.mask = torch.ones(1, 1, dtype=torch.bool, device=device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return key, value

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)


def probe_layouts(adapter: ModelAdapter) -> list[tuple[int, int, int]]:
    """(heads, key size, value size) of every layer, in order."""
    probe = LayoutProbe(adapter.device)
    with torch.inference_mode():
        token = torch.zeros(1, dtype=torch.long, device=adapter.device)
        states = adapter.embed(token, probe.positions)
        adapter.run_layers(states, 0, adapter.num_layers, adapter.layer_inputs(probe.positions, probe))
    return [probe.shapes[layer] for layer in range(adapter.num_layers)]
