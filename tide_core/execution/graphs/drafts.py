"""Drafting on a GPU as one graph launch: shallow layers, head, narrow head and router of each row's newest token.

A chain of drafts is one launch too, and read once: where every row takes the best token or stops, the next pass can
begin with it before the host has seen it. What follows a token that the host then refuses was drafted in vain: its K
and V lie behind the row's end, where the next tokens will be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_core.execution.graphs.base import TOKEN_SIZES, Buffer, CapturedPass, Passes, Step, room_for
from tide_core.exits.propose import Exits, Proposal
from tide_core.exits.row_cycle import RowCycle
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV, StepIndex
from tide_core.kv.kernel_view import Room
from tide_core.models.adapter import ModelAdapter
from tide_core.sampling.adjust import needs_adjusting


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
        one = self._ready(rows, [1] * len(rows))
        one.replay()
        scores, best_ids = one.both[0, :, : len(rows)].tolist()
        proposal = Proposal(one.logits[: len(rows)], scores, [int(i) for i in best_ids])
        return one.states[0, : len(rows)].clone(), proposal

    def run_chain(self, rows: Sequence[RowCycle], counts: Sequence[int]) -> Chain:
        """As many passes as the first row drafts; `counts` of the rows do not rise."""
        one = self._ready(rows, counts)
        one.replay()
        both = one.both[:, :, : len(rows)].tolist()
        return Chain(one.states[:, : len(rows)].clone(), [pair[0] for pair in both], [pair[1] for pair in both])

    def _ready(self, rows: Sequence[RowCycle], counts: Sequence[int]) -> _DraftPass:
        """The pass for a chain, loaded. All of the chain have one shape."""
        steps, length = self._steps(rows, counts), counts[0]
        room = room_for(steps[0][0], 3)
        return self._passes.ready((room, length), lambda: self._new(room, length), steps)

    def _steps(self, rows: Sequence[RowCycle], counts: Sequence[int]) -> list[Step]:
        """The newest token of each row, and those ahead of it, of which only the place is known."""
        size, newest = self._cache.block_size, [len(row.tokens) - 1 for row in rows]
        last = [
            row.span((token + count - 1, token + count)) for row, token, count in zip(rows, newest, counts, strict=True)
        ]
        tables = StepIndex.build(last, size).block_tables
        parts = [(row, (token, token + 1)) for row, token in zip(rows, newest, strict=True)]
        origins = self._exits.origins(parts, drafting=True)
        slots, distances = np.zeros((2, len(rows)), dtype=np.int64) if origins is None else origins
        tokens = np.asarray([row.tokens[-1] for row in rows], dtype=np.int64)
        places = np.asarray([row.step.start + token for row, token in zip(rows, newest, strict=True)], dtype=np.int64)
        steps: list[Step] = []
        for ahead in range(counts[0]):
            active = sum(count > ahead for count in counts)
            index = StepIndex.of_places(places[:active] + ahead, tables[:active], size)
            away = np.where(distances[:active] > 0, distances[:active] + ahead, 0)
            steps.append((index, [(tokens[:active], 0), (slots[:active], 0), (away, 0)]))
        return steps

    def _new(self, room: Room, length: int) -> _DraftPass:
        buffer = Buffer.of(room.size * length, self._cache.device)
        links = [_DraftPass(self._cache, self._kernels, room, part) for part in buffer.parts(length)]
        for link in links:
            link.prepare(self._adapter, self._exits, self._layers, links, buffer)
        return links[0]


class _DraftPass(CapturedPass):
    """Drafts one token for each row, and those that follow have it from the one before."""

    states: torch.Tensor
    """[D, R, width]"""
    logits: torch.Tensor
    """Of the last pass."""
    both: torch.Tensor
    """Scores and best ids, [D, 2, R]."""

    def prepare(
        self, adapter: ModelAdapter, exits: Exits, layers: range, links: Sequence[_DraftPass], whole: Buffer
    ) -> None:
        self._adapter, self._exits, self._layers = adapter, exits, layers
        self._links, self._whole = links, whole

    def load(self, steps: Sequence[Step]) -> None:
        self._whole.wait()
        for link, step in zip(self._links, steps, strict=True):
            link.write_down(step)
        self._whole.send()

    def _run(self) -> None:
        states, both = [], []
        tokens = self.others[0]
        for link in self._links:
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
        deep = (deep_slots, distances) if exits.checkpoints[0].head.spec.deep else (None, None)
        return states, *exits.judge(0, self, states, *deep)
