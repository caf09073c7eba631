"""Tokens through all layers, where no layer is skipped and the exits have one checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tide_core.exits.propose import Exits
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter


class ExitIndices(NamedTuple):
    """Of every token, [T]: the slot of its exit state (negative: none), the slot of the deep state before it, and how
    far back that is."""

    slots: torch.Tensor
    deep_slots: torch.Tensor
    distances: torch.Tensor


class DeepStates(NamedTuple):
    """States [T, D] at the only checkpoint, after all layers and the final norm, and what `Exits` has gathered."""

    at_checkpoint: torch.Tensor
    normed: torch.Tensor
    gathered: torch.Tensor | None = None
    tapped: Sequence[torch.Tensor] = ()
    """The sources of `gathered`: another stream may still read them."""


def run_deep(
    adapter: ModelAdapter,
    view: KernelView,
    token_ids: torch.Tensor,
    exits: Exits | None = None,
    aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> DeepStates:
    """With `exits`, all that `Exits.write_exit_state` needs, gathered in the context `aside` while the layers run;
    without, the state at the checkpoint is that after all layers."""
    inputs = adapter.layer_inputs(view.positions, view)
    states = adapter.embed(token_ids, view.positions)
    if exits is None:
        states = adapter.run_layers(states, 0, adapter.num_layers, inputs)
        return DeepStates(states[0], adapter.norm(states[0]))
    layer = exits.checkpoints[0].layer
    states = adapter.run_layers(states, 0, layer, inputs)
    at_checkpoint = states[0]
    tapped, gathered = dict.fromkeys(exits.taps, at_checkpoint), exits.gather_buffer(at_checkpoint)
    if gathered is not None:
        last = max(tapped)
        states = adapter.run_layers(states, layer, last, inputs, tapped=tapped)
        layer = max(layer, last)
        with aside():
            exits.gather(tapped, gathered)
    states = adapter.run_layers(states, layer, adapter.num_layers, inputs)
    return DeepStates(at_checkpoint, exits.norm(states[0], gathered), gathered, tuple(tapped.values()))
