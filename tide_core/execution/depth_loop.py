"""How deep tokens run, on the plain path: segments run here, and layers are skipped here.

The exits cut the model into segments. Each pass takes all tokens that have not run through a segment yet, whatever rows
they belong to and however many each has, and runs them as one flat batch. A token that skips layers (mode fast) is not
in it: `_write_skipped` writes its K and V of those layers, from the states that the skip map of its exit predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tide_core.errors import ConfigError
from tide_core.exits.artefact.fast import SkipMap
from tide_core.exits.row_cycle import Part, RowCycle
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV, PagedView
from tide_core.kv.kernel_view import view_kind, write_only_kind
from tide_core.models.adapter import LayerInputs, ModelAdapter


def plan_segments(num_layers: int, checkpoint_layers: tuple[int, ...]) -> tuple[range, ...]:
    """The layer ranges between exits: (2,) of 30 layers gives 0..1 and 2..29."""
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
        skip_maps: Sequence[SkipMap] = (),
    ) -> None:
        """`taps`: layers behind the first segment after which states are kept. `skip_maps`: of each exit; without any,
        the state at the exit stands for those that the skipped layers would see."""
        self.adapter = adapter
        self._skip_maps = skip_maps
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
        skipping = any(row.step.policy.skips_layers for row in rows)
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
                tapped = {}
            assert inputs is not None
            layers = self.segments[segment]
            mine = dict.fromkeys((tap for tap in self._taps if layers.start < tap <= layers.stop), states[0])
            states = self.adapter.run_layers(states, layers.start, layers.stop, inputs, tapped=mine)
            tapped |= mine
            self._keep_states(parts, segment, states[0])
            if skipping:
                self._keep_tapped(parts, mine)
            self._mark_done(rows, segment)
        if skipping and parts and stop == len(self.segments):
            tapped = {tap: _tapped(parts, tap) for tap in self._taps}
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
        """Keep the states of the tokens at the exit, and count the layers that ran for them."""
        end, num_layers = 0, len(self.segments[segment])
        is_exit = segment < len(self.segments) - 1
        for row, (first, stop) in parts:
            begin, end = end, end + stop - first
            row.layers_run += (stop - first) * num_layers
            if is_exit:
                row.pieces[segment].append((first, states[begin:end]))

    def _keep_tapped(self, parts: Sequence[Part], tapped: Mapping[int, torch.Tensor]) -> None:
        for tap, states in tapped.items():
            end = 0
            for row, (first, stop) in parts:
                begin, end = end, end + stop - first
                row.tapped.setdefault(tap, []).append((first, states[begin:end]))

    def _mark_done(self, rows: Sequence[RowCycle], segment: int) -> None:
        for row in rows:
            row.ran[segment] = len(row.tokens)

    def _write_skipped(self, rows: Sequence[RowCycle], segment: int) -> None:
        """K and V in a segment of the tokens that skip it, from the state each left with."""
        left: dict[int, list[tuple[RowCycle, int]]] = {}
        for row in rows:
            for first, stop in row.skipping(segment):
                for token in range(first, stop):
                    left.setdefault(row.left_at[token], []).append((row, token))
        layers = self.segments[segment]
        for exit_index, tokens in left.items():
            spans = [row.span((token, token + 1)) for row, token in tokens]
            view = self._write_only_kind(self.cache, self._kernels, spans)
            states = self._skipped_states(exit_index, tokens)
            self.adapter.project_kv(states, layers.start, layers.stop, self.adapter.layer_inputs(view.positions, view))

    def _skipped_states(self, exit_index: int, tokens: Sequence[tuple[RowCycle, int]]) -> Callable[[int], torch.Tensor]:
        """What each layer behind an exit would have seen of tokens that left there, [1, T, D]."""
        at_exit = torch.cat([s for row, token in tokens for s in row.take(exit_index, (token, token + 1))])
        if not self._skip_maps:
            carried = at_exit.unsqueeze(0)
            return lambda layer: carried
        skip_map = self._skip_maps[exit_index]
        moves = skip_map.moves(torch.cat([row.codes[token] for row, token in tokens]))
        return lambda layer: skip_map.state(layer, at_exit, moves).unsqueeze(0)


def _tapped(parts: Sequence[Part], tap: int) -> torch.Tensor:
    """The states of these tokens at a tap, [T, D], whenever they ran up to it."""
    return torch.cat([states for row, tokens in parts for states in row.take_tapped(tap, tokens)])
