"""Drafting on a GPU as one graph launch: shallow layers, head, narrow head and router of each row's newest token.

A chain of drafts is one launch too, and read once: where every row takes the best token or stops, the next pass can
begin with it before the host has seen it. What follows a token that the host then refuses was drafted in vain: its K
and V lie behind the row's end, where the next tokens will be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tide_core.engine.captured_pass import TOKEN_SIZES, CapturedPass, Passes, room_for
from tide_core.engine.cycle import Range, RowCycle
from tide_core.engine.exits import Exits, Proposal
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV, RowSpan, StepIndex
from tide_core.kv.kernel_view import Other, Room
from tide_core.models.adapter import ModelAdapter
from tide_core.sampling.adjust import needs_adjusting

Step = tuple[StepIndex, list[Other]]
"""What one pass of a chain is loaded with."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What comes of a chain of D passes over R rows."""

    states: torch.Tensor
    """At the checkpoint, [D, R, width]."""
    scores: list[list[float]]
    best_ids: list[list[float]]


class CapturedDrafts:
    """Runs the first segment and the only checkpoint for rows that draft one token more, or several."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits,
        layers: range,
        *,
        capture: bool | None = None,
    ) -> None:
        """Without `capture` the same passes run op by op, as they do on a CPU."""
        self._adapter, self._cache, self._kernels, self._exits, self._layers = adapter, cache, kernels, exits, layers
        on_gpu = cache.device.type == "cuda"
        self._passes: Passes[_DraftPass] = Passes(capture=on_gpu if capture is None else capture)

    @staticmethod
    def takes(rows: Sequence[RowCycle]) -> bool:
        """Whether nothing of any row but its newest token has yet to run up to the checkpoint and to be proposed on."""
        return len(rows) <= TOKEN_SIZES[-1] and all(
            row.ran[0] == row.headed[0] == len(row.tokens) - 1 and row.step.policy.draft_thresholds[0] <= 1.0
            for row in rows
        )

    @staticmethod
    def chains(rows: Sequence[RowCycle]) -> bool:
        """Whether what each row would draft is known without the host: the best token, as it is."""
        for row in rows:
            params = row.step.request.params
            if not params.is_greedy or needs_adjusting(row.sampling_row(len(row.tokens) - 1)):
                return False
            if params.logprobs is not None and row.step.policy.skips_layers:
                return False
        return True

    def run(self, rows: Sequence[RowCycle]) -> tuple[torch.Tensor, Proposal]:
        """States at the checkpoint [R, D] and what it proposes; its logits last until the next run."""
        one = self._ready([self._step(rows, 0)])
        one.replay()
        scores, best_ids = one.both[0, :, : len(rows)].tolist()
        proposal = Proposal(one.logits[: len(rows)], scores, [int(i) for i in best_ids])
        return one.states[0, : len(rows)].clone(), proposal

    def run_chain(self, rows: Sequence[RowCycle], counts: Sequence[int]) -> Chain:
        """As many passes as the first row drafts; `counts` of the rows do not rise."""
        steps = []
        for ahead in range(counts[0]):
            active = sum(count > ahead for count in counts)
            steps.append(self._step(rows[:active], ahead))
        one = self._ready(steps)
        one.replay()
        both = one.both[:, :, : len(rows)].tolist()
        return Chain(one.states[:, : len(rows)].clone(), [pair[0] for pair in both], [pair[1] for pair in both])

    def _step(self, rows: Sequence[RowCycle], ahead: int) -> Step:
        """The newest token of each row, or the one so far ahead of it, of which only the place is known."""
        parts: list[tuple[RowCycle, Range]] = [(row, (len(row.tokens) - 1, len(row.tokens))) for row in rows]
        spans = [row.span(tokens) for row, tokens in parts]
        moved = [RowSpan(span.block_ids, span.start + ahead, 1) for span in spans]
        index = StepIndex.build(moved, self._cache.block_size)
        origins = self._exits.origins(parts, drafting=True)
        slots, distances = np.zeros((2, len(rows)), dtype=np.int64) if origins is None else origins
        distances = np.where(distances > 0, distances + ahead, 0)
        tokens = np.asarray([row.tokens[-1] for row in rows], dtype=np.int64)
        return index, [(tokens, 0), (slots, 0), (distances, 0)]

    def _ready(self, steps: list[Step]) -> _DraftPass:
        """The pass for a chain, loaded. All of the chain have one shape."""
        (index, others), *following = steps
        room = replace(room_for(index, 3), blocks=max(room_for(each, 3).blocks for each, _ in steps))
        return self._passes.ready((room, len(steps)), lambda: self._new(room, len(steps)), index, others, following)

    def _new(self, room: Room, length: int) -> _DraftPass:
        links = [_DraftPass(self._cache, self._kernels, room) for _ in range(length)]
        for link in links:
            link.prepare(self._adapter, self._exits, self._layers, links[1:])
        return links[0]


class _DraftPass(CapturedPass):
    """Drafts one token for each row, and those that follow have it from the one before."""

    states: torch.Tensor
    """[D, R, width]"""
    logits: torch.Tensor
    """Of the last pass."""
    both: torch.Tensor
    """Scores and best ids, [D, 2, R]."""

    def prepare(self, adapter: ModelAdapter, exits: Exits, layers: range, following: Sequence[_DraftPass]) -> None:
        self._adapter, self._exits, self._layers, self._following = adapter, exits, layers, following

    def fill(self, following: Sequence[Step]) -> None:
        for link, (index, others) in zip(self._following, following, strict=True):
            link.load(index, others)

    def _run(self) -> None:
        states, both = [], []
        tokens = self.others[0]
        for link in (self, *self._following):
            at_checkpoint, self.logits, judged = link.draft(tokens)
            states.append(at_checkpoint)
            both.append(judged)
            tokens = judged[1].long()
        self.states, self.both = torch.stack(states), torch.stack(both)

    def draft(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States, logits, and scores with best ids, of the tokens that stand where this pass is loaded for."""
        adapter, exits = self._adapter, self._exits
        _, deep_slots, distances = self.others
        inputs = adapter.layer_inputs(self.positions, self)
        entering = adapter.embed(tokens, self.positions)
        states = adapter.run_layers(entering, self._layers.start, self._layers.stop, inputs)[0]
        deep = None
        if exits.checkpoints[0].head.spec.deep:
            deep = self._cache.deep_states[0].index_select(0, deep_slots)
        return states, *exits.judge(0, self, states, deep, distances)
