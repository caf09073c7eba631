"""How a cycle makes drafts on the device: a pass of the first layers and the head for each draft, or one pass for all.

Both give a proposal for each draft in turn, and read the choice that was made of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from tide_core.execution.graphs.cycle_output import OutputBuffer
from tide_core.execution.graphs.cycle_shape import CycleShape
from tide_core.exits.propose import Exits
from tide_core.kernels.reference.cycle import CycleParts
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter


class DraftProposal(NamedTuple):
    """What the head proposes for one draft of each row: features [R, D] and logits [R, S]."""

    features: torch.Tensor
    logits: torch.Tensor


class DraftMaker(Protocol):
    def proposals(self) -> Iterator[DraftProposal]:
        """One for each draft. Before the next, `OutputBuffer.places` must have what was chosen of the one before."""
        ...


class TokenByToken:
    """A pass for each draft, which begins with the draft of the pass before; the first with the newest tokens."""

    def __init__(
        self, adapter: ModelAdapter, exits: Exits, parts: CycleParts, output: OutputBuffer, views: list[KernelView]
    ) -> None:
        self._adapter, self._exits, self._parts, self._output, self._views = adapter, exits, parts, output, views

    def proposals(self) -> Iterator[DraftProposal]:
        adapter, exits, parts = self._adapter, self._exits, self._parts
        for distance, view in enumerate(self._views):
            if distance:
                entering = exits.embed_drafts(self._output.places[distance - 1], view.positions)
            else:
                entering = adapter.embed(parts.newest, view.positions)
            states = _first_layers(adapter, exits, view, entering)
            yield DraftProposal(*exits.draft(view, states, parts.draft_deep_slots, parts.draft_distances[distance]))


class InOnePass:
    """One pass of the newest tokens through the first layers, one of the head's block over all places of all rows, then
    the head's cell for one draft after another.

    The places of a row have the indices of its tokens in the deep pass: one more than its drafts, whose result nobody
    reads. The deep pass writes the exit state there anew."""

    def __init__(
        self,
        adapter: ModelAdapter,
        exits: Exits,
        parts: CycleParts,
        output: OutputBuffer,
        shape: CycleShape,
        newest: KernelView,
        places: KernelView,
    ) -> None:
        """`newest`: the view of the first draft; `places`: that of the deep pass."""
        self._adapter, self._exits, self._parts, self._output = adapter, exits, parts, output
        self._newest, self._places, self._rows, self._drafts = newest, places, shape.rows, shape.drafts
        self._is_ragged = shape.rows > 1 and shape.branches == 1
        """Whether rows may differ in their number of drafts: branches have as many as each other."""
        device = parts.newest.device
        rows, ahead = torch.arange(shape.rows, device=device), torch.arange(shape.drafts + 1, device=device)
        self._ahead = ahead[:-1, None]
        # The head's inputs are made for as many places of every row. Where rows are ragged, they are ordered as
        # `sources` counts them, place by place; else row by row, as they are in the deep pass.
        rows, ahead = (
            (rows.repeat(len(ahead)), ahead.repeat_interleave(len(rows)))
            if self._is_ragged
            else (rows.repeat_interleave(len(ahead)), ahead.repeat(len(rows)))
        )
        self._row_of = rows
        deep_slots, distances = parts.draft_deep_slots, parts.draft_distances
        # Deep slots and distances are parts of one buffer, so that one launch gathers both.
        begin = int(distances.storage_offset()) - int(deep_slots.storage_offset())
        self._planned = deep_slots.as_strided((begin + distances.numel(),), (1,))
        self._inputs_of = torch.stack((rows, begin + ahead.clamp(max=shape.drafts - 1) * shape.rows + rows))

    def proposals(self) -> Iterator[DraftProposal]:
        adapter, exits, parts = self._adapter, self._exits, self._parts
        newest, kernels = self._newest, self._newest.kernels
        states = _first_layers(adapter, exits, newest, adapter.embed(parts.newest, newest.positions))
        deep_slots, distances = self._planned.index_select(0, self._inputs_of.flatten()).view(2, -1)
        embedded = exits.embed_places(kernels.embed(self._row_of, states), deep_slots, distances)
        if self._is_ragged:
            embedded = kernels.embed(parts.sources, embedded)
        by_place = self._by_place(exits.refine_places(self._places, embedded))
        skipped, before = exits.skip(states), by_place[0]
        for distance, refined in enumerate(by_place):
            if distance:
                chosen = self._output.places[distance - 1], parts.draft_positions[distance]
                refined = exits.advance(refined, before, *chosen)
            before = refined
            yield DraftProposal(*exits.features_at(refined, skipped))

    def _by_place(self, refined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[R, d] for each draft. A row with fewer drafts has those of other rows instead, for what nobody reads."""
        if not self._is_ragged:
            return refined.view(self._rows, self._drafts + 1, -1).unbind(1)[:-1]
        at = (self._parts.starts[:-1] + self._ahead).flatten()
        return self._newest.kernels.embed(at, refined).view(self._drafts, self._rows, -1).unbind()


def _first_layers(adapter: ModelAdapter, exits: Exits, view: KernelView, states: torch.Tensor) -> torch.Tensor:
    """States [T, D] at the only checkpoint, from those that enter the model, [1, T, D]."""
    [checkpoint] = exits.checkpoints
    inputs = adapter.layer_inputs(view.positions, view)
    return adapter.run_layers(states, 0, checkpoint.layer, inputs)[0]
