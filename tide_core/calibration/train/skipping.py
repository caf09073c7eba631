"""A pass over whole sequences in which some tokens have left: what the others make of K and V of skipped layers.

The layers are frozen. Before each, the states of tokens that have left are replaced by those that the skip map of their
exit predicts, so the layer makes K and V of these, as the engine does. Tokens that stay see them. Gradients flow from
the logits of those tokens back into the skip maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tide_core.calibration.train.teacher import plain_inputs
from tide_core.exits.artefact.fast import SkipMap
from tide_core.models.adapter import LayerInputs, ModelAdapter

ON_DEVICE = 8 * 2**30
"""Bytes of a GPU that what layers keep for their gradients may take; beyond, layers run again on the way back."""
KEPT_WIDTHS = 24
"""What a layer keeps of a token, in widths of the model."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Which tokens leave where, [B, S] each."""

    exits: Tensor
    """Index of the exit; -1 for a token that runs all layers."""
    distances: Tensor
    """How far back the last token lies that ran all layers; 0 if there is none."""


def leaving(scores: Tensor, threshold: float, may_leave: Tensor, max_run: int, offset: int) -> Leaving:
    """Tokens leave at the first exit whose score [E, B, S] reaches the threshold, where they may [B, S]. One of
    `max_run` + 1 positions stays, counted from `offset`, so that no more leave in a row."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    may_leave = may_leave & ((positions + offset) % (max_run + 1) != 0)
    reached = scores >= threshold
    first = reached.int().argmax(0)
    exits = torch.where(reached.any(0) & may_leave, first, -1)
    stayed = torch.where(exits < 0, positions, -1).cummax(-1).values
    before = torch.nn.functional.pad(stayed, (1, 0), value=-1)[..., :-1]
    return Leaving(exits, torch.where(before >= 0, positions - before, 0))


class SkippingPass:
    """Runs a model whose layers can be called one by one."""

    def __init__(self, adapter: ModelAdapter, layers: Sequence[int], maps: Sequence[SkipMap]) -> None:
        """`layers`: of the exits; `maps`: their skip maps."""
        self._adapter, self._layers, self._maps = adapter, layers, maps

    def run(self, tokens: Tensor, exits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """The states after the last layer [B * S, D], of meaning for tokens that stayed, from tokens [B, S], the exits
        where they leave [B, S] and features of each exit [B * S, D]."""
        adapter, (num_rows, length) = self._adapter, tokens.shape
        positions = torch.arange(length, device=tokens.device)
        flat = adapter.embed(tokens.flatten(), positions.repeat(num_rows)).view(num_rows * length, -1)
        inputs, chosen = plain_inputs(adapter, positions), exits.flatten()
        left: list[tuple[SkipMap, Tensor, Tensor, Tensor]] = []
        kept = KEPT_WIDTHS * flat.numel() * flat.element_size() * adapter.num_layers
        runs_again = flat.device.type != "cuda" or kept > ON_DEVICE
        for layer in range(adapter.num_layers):
            for index, at in enumerate(self._layers):
                rows = (chosen == index).nonzero().squeeze(-1) if at == layer else chosen[:0]
                if len(rows):
                    states, skip_map = flat[rows].float(), self._maps[index]
                    moves = skip_map.moves(skip_map.code(states, features[index][rows])).float()
                    left.append((skip_map, rows, states, moves))
            for skip_map, rows, states, moves in left:
                flat = flat.index_put((rows,), skip_map.state(layer, states, moves).to(flat.dtype))
            seen = flat.view(num_rows, length, -1)
            flat = self._run_layer(layer, seen, inputs, runs_again and bool(left)).flatten(0, 1)
        return flat

    def _run_layer(self, layer: int, states: Tensor, inputs: LayerInputs, runs_again: bool) -> Tensor:
        """One layer; with `runs_again` it keeps nothing for the gradients and runs again on the way back."""
        if not runs_again:
            return self._adapter.run_layers(states, layer, layer + 1, inputs)
        again: Tensor = checkpoint(self._adapter.run_layers, states, layer, layer + 1, inputs, use_reentrant=False)
        return again
