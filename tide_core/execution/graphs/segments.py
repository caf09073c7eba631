"""Segments on a GPU as one graph launch each, for steps of few tokens.

The last one goes on to the end of the step: final norm, what the exits keep of every token, and logits where all tokens
are asked for theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tide_core.execution.graphs.base import TOKEN_SIZES, CapturedPass, Passes, room_for
from tide_core.exits.propose import Exits
from tide_core.exits.row_cycle import Range, RowCycle
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV, StepIndex
from tide_core.kv.kernel_view import FEW_QUERIES, Other, Room
from tide_core.models.adapter import ModelAdapter

Part = tuple[RowCycle, Range]


@dataclass(frozen=True, slots=True)
class Captured:
    """What a segment leaves, until the next pass runs; [T, D] and [T, V]."""

    states: torch.Tensor
    """Those of an earlier segment last."""
    normed: torch.Tensor | None = None
    """Behind the last segment."""
    logits: torch.Tensor | None = None
    best: torch.Tensor | None = None
    """The largest of the logits and where it stands, [2, T] float64."""
    tapped: dict[int, torch.Tensor] | None = None
    is_remembered: bool = False
    """Whether the exits have been given all that they keep."""


class CapturedSegments:
    """Runs tokens through one segment."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        segments: Sequence[range],
        exits: Exits | None = None,
        *,
        capture: bool | None = None,
    ) -> None:
        """Without `capture` the same passes run op by op, as they do on a CPU."""
        self._adapter, self._cache, self._kernels, self._segments, self._exits = (
            adapter,
            cache,
            kernels,
            segments,
            exits,
        )
        on_gpu = cache.device.type == "cuda"
        self._passes: Passes[_SegmentPass] = Passes(capture=on_gpu if capture is None else capture)

    @staticmethod
    def takes(parts: Sequence[Part]) -> bool:
        """Whether these are few enough."""
        counts = [stop - first for _, (first, stop) in parts]
        return sum(counts) <= TOKEN_SIZES[-1] and max(counts) <= FEW_QUERIES

    def run(self, segment: int, parts: Sequence[Part], entering: torch.Tensor | None) -> Captured:
        """From what enters the segment, [T, D]; None: from the tokens' embedding."""
        index = StepIndex.build([row.span(tokens) for row, tokens in parts], self._cache.block_size)
        flat = np.asarray([token for row, (first, stop) in parts for token in row.tokens[first:stop]], dtype=np.int64)
        num, is_last = len(flat), segment == len(self._segments) - 1
        ends = is_last and all(row.step.samples and len(row.tokens) == len(row.drafts) + 1 for row, _ in parts)
        keeps = is_last and self._can_keep(parts)
        others = [(flat, 0), *(self._kept(index, parts) if keeps else ())]
        room = room_for(index, len(others))
        shape = segment, room, ends, keeps
        make = functools.partial(self._new, segment, room, entering, ends=ends, keeps=keeps)
        one = self._passes.ready(shape, make, [(index, others)], entering)
        one.replay()
        if not is_last:
            return Captured(one.states[:num].clone())
        tapped = {tap: at[:num] for tap, at in one.tapped.items()}
        logits, best = (one.logits[:num], one.best[:, :num]) if ends else (None, None)
        return Captured(one.states[:num], one.normed[:num], logits, best, tapped, keeps)

    def _can_keep(self, parts: Sequence[Part]) -> bool:
        """Whether what the exits keep follows from these tokens alone, in the order they are in."""
        exits = self._exits
        if exits is None or len(exits.checkpoints) > 1:
            return False
        return any(row.tracked for row, _ in parts) and not any(row.left_at for row, _ in parts)

    def _kept(self, index: StepIndex, parts: Sequence[Part]) -> list[Other]:
        """Where what is kept of every token goes (nowhere: -1), where the deep state before it is, and how far back."""
        assert self._exits is not None
        tracked = np.repeat([row.tracked for row, _ in parts], [stop - first for _, (first, stop) in parts])
        origins = self._exits.origins(parts, drafting=False)
        deep = np.zeros((2, len(tracked)), dtype=np.int64) if origins is None else origins
        return [(np.where(tracked, index.slots, -1), -1), (deep[0], 0), (deep[1], 0)]

    def _new(self, segment: int, room: Room, entering: torch.Tensor | None, *, ends: bool, keeps: bool) -> _SegmentPass:
        one = _SegmentPass(self._cache, self._kernels, room)
        one.prepare(self._adapter, self._segments[segment], self._exits, entering, ends=ends, keeps=keeps)
        one.is_last = segment == len(self._segments) - 1
        return one


class _SegmentPass(CapturedPass):
    """A pass through one segment."""

    states: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    entering: torch.Tensor
    is_last: bool
    _scratch: Any = None

    def prepare(
        self,
        adapter: ModelAdapter,
        layers: range,
        exits: Exits | None,
        entering: torch.Tensor | None,
        *,
        ends: bool,
        keeps: bool,
    ) -> None:
        self._adapter, self._layers, self._exits, self._ends, self._keeps = adapter, layers, exits, ends, keeps
        self._embeds = entering is None
        self.tapped: dict[int, torch.Tensor] = {}
        if entering is not None:
            self.entering = entering.new_zeros(self._room.tokens, entering.shape[1])

    def enter(self, entering: torch.Tensor) -> None:
        self.entering[: len(entering)] = entering

    def _run(self) -> None:
        adapter, layers = self._adapter, self._layers
        entering = adapter.embed(self.others[0], self.positions) if self._embeds else self.entering.unsqueeze(0)
        if self.is_last and self._exits is not None:
            self.tapped = dict.fromkeys(self._exits.taps, entering[0])
        inputs = adapter.layer_inputs(self.positions, self)
        self.states = adapter.run_layers(entering, layers.start, layers.stop, inputs, tapped=self.tapped)[0]
        if not self.is_last:
            return
        self.normed = adapter.norm(self.states)
        if self._keeps:
            assert self._exits is not None
            slots, deep_slots, distances = self.others[1:]
            gathered = self._exits.room(self.states)
            if gathered is not None:
                self._exits.gather(self.tapped, gathered)
            self._exits.keep(self, entering[0], self.normed, gathered, slots, deep_slots, distances)
        if self._ends:
            self.logits = adapter.head(self.normed)
            peaks = self._kernels.peak(self.logits, self._scratch_for(self.logits))
            self.best = torch.stack((peaks.best.double(), peaks.best_at.double()))

    def _scratch_for(self, logits: torch.Tensor) -> Any:
        if self._scratch is None:  # the first run is not captured
            self._scratch = self._kernels.judge_scratch(logits.device, len(logits), vocabulary=logits.shape[1])
        return self._scratch
