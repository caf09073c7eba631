"""How deep tokens run, on the plain path: segments run here, and layers are skipped here.

The checkpoint layers cut the model into segments. Each pass takes all tokens that have not run through a segment yet,
whatever rows they belong to and however many each has, and runs them as one flat batch. A token that skips layers (mode
fast) is not in it: `_write_skipped` writes its K and V of those layers, projected from the state it left with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tide_core.errors import ConfigError
from tide_core.exits.row_cycle import Part, RowCycle
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV, PagedView
from tide_core.kv.kernel_view import view_kind, write_only_kind
from tide_core.models.adapter import LayerInputs, ModelAdapter


def plan_segments(num_layers: int, checkpoint_layers: tuple[int, ...]) -> tuple[range, ...]:
    """The layer ranges between checkpoint layers: (2,) of 30 layers gives 0..1 and 2..29."""
    if checkpoint_layers and checkpoint_layers[-1] >= num_layers:
        expected = f"layer counts below the model's {num_layers}: the last layer is no checkpoint"
        raise ConfigError("checkpoint_layers", checkpoint_layers, expected)
    borders = (0, *checkpoint_layers, num_layers)
    return tuple(range(start, stop) for start, stop in pairwise(borders))


@dataclass(frozen=True, slots=True)
class Ran:
    """The tokens that ran through the last segment of a pass."""

    parts: list[Part]
    view: PagedView | None
    """Their view of the pool; None if no token ran."""
    states: torch.Tensor
    """After it, [T, D]."""
    tapped: dict[int, torch.Tensor]
    """States at the taps, [T, D], by the layers that had run, where the last segment ran."""


class DepthLoop:
    """Runs tokens through segments."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: Kernels,
        segments: tuple[range, ...],
        taps: tuple[int, ...] = (),
    ) -> None:
        """`taps`: layers of the last segment after which states are kept."""
        self.adapter = adapter
        self._taps = taps
        self.cache = cache
        self.segments = segments
        self._kernels = kernels
        self._view_kind = view_kind(cache, kernels, gathers_kv=adapter.gathers_kv)
        self._write_only_kind = write_only_kind(self._view_kind)

    def view(self, parts: Sequence[Part]) -> PagedView:
        """The view of the pool for these tokens."""
        return self._view_kind(self.cache, self._kernels, [row.span(tokens) for row, tokens in parts])

    def run(self, rows: Sequence[RowCycle], first: int, stop: int) -> Ran:
        """All tokens of the rows that have not passed the segments `first` up to `stop`."""
        parts: list[Part] = []
        view: PagedView | None = None
        inputs: LayerInputs | None = None
        states = torch.empty(0)
        tapped: dict[int, torch.Tensor] = {}
        for segment in range(first, stop):
            self._write_skipped(rows, segment)
            before, parts = parts, [(row, tokens) for row in rows for tokens in row.running(segment)]
            if not parts:
                self._mark_done(rows, segment)
                continue
            if view is None or parts != before:
                view = self.view(parts)
                inputs = self.adapter.layer_inputs(view.positions, view)
                states = self._enter(parts, segment, view)
            assert inputs is not None
            layers = self.segments[segment]
            if segment == len(self.segments) - 1:
                tapped = dict.fromkeys(self._taps, states[0])
            states = self.adapter.run_layers(states, layers.start, layers.stop, inputs, tapped=tapped)
            self._keep_states(parts, segment, states[0])
            self._mark_done(rows, segment)
        return Ran(parts, view, states[0] if parts else states, tapped)

    def _enter(self, parts: Sequence[Part], segment: int, view: PagedView) -> torch.Tensor:
        """The states that enter a segment, [1, T, D]."""
        if segment == 0:
            flat = [token for row, (first, stop) in parts for token in row.tokens[first:stop]]
            token_ids = torch.tensor(flat, dtype=torch.long, device=self.cache.device)
            return self.adapter.embed(token_ids, view.positions)
        taken = [states for row, tokens in parts for states in row.take(segment - 1, tokens)]
        return (torch.cat(taken) if len(taken) > 1 else taken[0]).unsqueeze(0)

    def _keep_states(self, parts: Sequence[Part], segment: int, states: torch.Tensor) -> None:
        """Keep the states of the tokens at the checkpoint, and count the layers that ran for them."""
        end, num_layers = 0, len(self.segments[segment])
        is_checkpoint = segment < len(self.segments) - 1
        for row, (first, stop) in parts:
            begin, end = end, end + stop - first
            row.layers_run += (stop - first) * num_layers
            if is_checkpoint:
                row.pieces[segment].append((first, states[begin:end]))

    def _mark_done(self, rows: Sequence[RowCycle], segment: int) -> None:
        for row in rows:
            row.ran[segment] = len(row.tokens)

    def _write_skipped(self, rows: Sequence[RowCycle], segment: int) -> None:
        """K and V in a segment of the tokens that skip it, from the state each left with."""
        parts = [(row, tokens) for row in rows for tokens in row.skipping(segment)]
        if not parts:
            return
        taken = [
            states
            for row, (first, stop) in parts
            for token in range(first, stop)
            for states in row.take(row.left_at[token], (token, token + 1))
        ]
        view = self._write_only_kind(self.cache, self._kernels, [row.span(tokens) for row, tokens in parts])
        inputs = self.adapter.layer_inputs(view.positions, view)
        layers = self.segments[segment]
        self.adapter.project_kv(torch.cat(taken).unsqueeze(0), layers.start, layers.stop, inputs)
