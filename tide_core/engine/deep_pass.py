"""Tokens through all layers at once, where no layer is skipped and the exits have one checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tide_core.engine.exits import Exits
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter


class Kept(NamedTuple):
    """Of every token, [T]: where what the exits keep of it goes (nowhere: negative), where the deep state before it
    lies, and how far back that is."""

    slots: torch.Tensor
    deep_slots: torch.Tensor
    distances: torch.Tensor


class DeepStates(NamedTuple):
    """States [T, D] at the only checkpoint, behind all layers and the final norm, and at the taps."""

    at_checkpoint: torch.Tensor
    normed: torch.Tensor
    tapped: dict[int, torch.Tensor]


def run_deep(
    adapter: ModelAdapter, view: KernelView, token_ids: torch.Tensor, exits: Exits | None = None
) -> DeepStates:
    """With `exits` there is all that `Exits.keep` wants; without, the checkpoint is where layer 0 is."""
    inputs = adapter.layer_inputs(view.positions, view)
    states = adapter.embed(token_ids, view.positions)
    tapped: dict[int, torch.Tensor] = {}
    layer = 0
    if exits is not None:
        layer = exits.checkpoints[0].layer
        states = adapter.run_layers(states, 0, layer, inputs)
        tapped = dict.fromkeys(exits.taps, states[0])
    at_checkpoint = states[0]
    states = adapter.run_layers(states, layer, adapter.num_layers, inputs, tapped=tapped)
    return DeepStates(at_checkpoint, adapter.norm(states[0]), tapped)
