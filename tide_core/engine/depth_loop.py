"""How deep tokens go. The file that is TIDE: segments are run here, one after another.

The layers are cut at the checkpoint layers into segments. A token that goes to full depth passes all of them, in
order, with the same KV view; states between two segments are what an exit would decide on.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tide_core.batch import KVView
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter


def plan_segments(num_layers: int, checkpoint_layers: tuple[int, ...]) -> tuple[range, ...]:
    """The layer ranges between checkpoint layers: (2,) of 30 layers gives 0..1 and 2..29."""
    if checkpoint_layers and checkpoint_layers[-1] >= num_layers:
        expected = f"layer counts below the model's {num_layers}: the last layer is no checkpoint"
        raise ConfigError("checkpoint_layers", checkpoint_layers, expected)
    borders = (0, *checkpoint_layers, num_layers)
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def run_full_depth(
    adapter: ModelAdapter,
    segments: tuple[range, ...],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
) -> torch.Tensor:
    """All tokens of a step, [T], through all segments; returns their last states, [T, D], before the final norm."""
    states = adapter.embed(token_ids, positions)
    inputs = adapter.layer_inputs(positions, view)
    for segment in segments:
        states = adapter.run_layers(states, segment.start, segment.stop, inputs)
    return states[0]
