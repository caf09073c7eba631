"""The artefact at work on one model: what a checkpoint proposes, and the memory its heads keep.

Two things are remembered per token, in the same pages as its K and V: the deep state (the final-norm state, once the
token has run all layers), and K and V of each head with attention. Drafting writes the latter with the deep state that
is known at the time, some positions back; the catch-up then writes them again with that of the position just before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_core.engine.cycle import Range, RowCycle
from tide_core.kv.cache import PagedKV, PagedView
from tide_core.models.adapter import ModelAdapter, NarrowHead
from tide_core.routing.heads import ExitHead
from tide_core.routing.router import Router, confidence_of

Part = tuple[RowCycle, Range]


@dataclass(frozen=True, slots=True)
class BoundCheckpoint:
    """One checkpoint layer with its head and router, cast and placed like the model."""

    layer: int
    head: ExitHead
    router: Router
    kv_layer: int
    """Where the pool keeps K and V of the head; -1 for a head without attention."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a checkpoint says about some tokens."""

    logits: torch.Tensor
    """[T, S], over the shortlist."""
    scores: torch.Tensor
    """[T]"""


class Exits:
    """All checkpoints of an artefact, bound to the model and its pool."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        checkpoints: Sequence[BoundCheckpoint],
        shortlist: torch.Tensor,
        narrow_head: NarrowHead,
    ) -> None:
        self.checkpoints = tuple(checkpoints)
        self.shortlist = shortlist.to(cache.device)
        self.last_segment = len(self.checkpoints)
        self._adapter = adapter
        self._cache = cache
        self._narrow_head = narrow_head
        self._fed = any(checkpoint.head.spec.deep for checkpoint in self.checkpoints)

    def propose(
        self, index: int, parts: Sequence[Part], view: PagedView, states: torch.Tensor, *, each: bool = False
    ) -> Proposal:
        """Logits and scores for what follows the last token (or each) of each part, from states [T, D] of all."""
        checkpoint = self.checkpoints[index]
        deep, distances = self._deep_states(parts, drafting=True)
        embedded = checkpoint.head.embed(states, deep, distances)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            view.write(checkpoint.kv_layer, key, value)
            return view.attend_paged(checkpoint.kv_layer, query, query.shape[-1] ** -0.5)

        features = checkpoint.head.refine(embedded, view.positions, attend)
        if len(features) != len(parts) and not each:
            ends = np.cumsum([stop - first for _, (first, stop) in parts]) - 1
            features = features[torch.from_numpy(ends).to(features.device)]
        logits = self._narrow_head(self._adapter.norm(features))
        return Proposal(logits, checkpoint.router.score(features, confidence_of(logits)))

    def remember(self, view: PagedView, normed: torch.Tensor) -> None:
        """Keep the deep states, [T, D], of the view's tokens, which ran all layers."""
        if self._fed:
            self._cache.deep_states[view.slots] = normed

    def refresh(self, index: int, parts: Sequence[Part], view: PagedView, states: torch.Tensor) -> None:
        """Write the head's K and V again, now that the deep states of the tokens before are known."""
        checkpoint = self.checkpoints[index]
        deep, distances = self._deep_states(parts, drafting=False)
        embedded = checkpoint.head.embed(states, deep, distances)
        view.write(checkpoint.kv_layer, *checkpoint.head.keys_values(embedded, view.positions))

    def _deep_states(self, parts: Sequence[Part], *, drafting: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """For every token of the parts the last deep state before it, [T, D], and how far back it is, [T]."""
        if not self._fed:
            return None, None
        slots: list[int] = []
        distances: list[int] = []
        for row, (first, stop) in parts:
            if drafting:  # nothing of this cycle has run deep yet
                known = row.step.start > 0 and len(row.step.token_ids) == 1
                slots += [row.deep_slot(self._cache.block_size)] * (stop - first)
                distances += range(first + 1, stop + 1) if known else [0] * (stop - first)
            else:
                sources, away = row.deep_sources((first, stop), self.last_segment)
                slots += row.slots(sources, self._cache.block_size).tolist()
                distances += away.tolist()
        both = torch.tensor((slots, distances), device=self._cache.device)
        return self._cache.deep_states.index_select(0, both[0]), both[1]
