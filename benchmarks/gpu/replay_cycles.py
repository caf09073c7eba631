"""Replayed acceptance in CUDA graphs, where the next cycle starts before the result of the last one is read.

The next cycle starts after the last accepted draft, and drafts of a model without trained exits are never accepted. So,
before cycles are captured, the op that accepts drafts is replaced by one that reads the number of accepted drafts from
a tensor; each launch fills the tensor with the next counts of the trace. All drafts are made and verified.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.cycle_graph import CycleGraph
from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.kernels.reference.cycle import MOST_ROWS

Cycle = tuple[int, int]
"""Numbers of drafted and accepted tokens of one row."""


class ReplayedCycles:
    """Cycles whose rows accept the numbers of drafts of a trace."""

    def __init__(self, cycles: GraphCycles, trace: Sequence[Cycle]) -> None:
        self._cycles, self._trace = cycles, itertools.cycle(trace)
        self.cycles: list[Cycle] = []
        self._graphs: dict[CycleShape, CycleGraph] = {}
        device = cycles._cache.device
        self._accepted = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(MOST_ROWS, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(4)]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Replay inside of this context."""
        cycles, before = self._cycles, (self._cycles._kernels, self._cycles._graphs)
        cycles.discard_lookahead()
        cycles._kernels, cycles._graphs = replace(before[0], accept_drafts=self._accept_drafts), self._graphs
        cycles.__dict__["_launch"] = self._launch
        try:
            yield
        finally:
            del cycles.__dict__["_launch"]
            cycles._kernels, cycles._graphs = before
            cycles.discard_lookahead()

    def _launch(self, rows: Sequence[RowPlace], num_cycles: int = 1) -> InFlightStep:
        """One step per launch: each step has its own counts."""
        accepted = [min(next(self._trace)[1], row.drafts) for row in rows]
        self.cycles += [(row.drafts, count) for row, count in zip(rows, accepted, strict=True) if row.drafts]
        self._hosts.append(self._hosts.pop(0))  # the buffer that was used longest ago
        self._hosts[0][: len(rows)] = torch.tensor(accepted)
        self._accepted.copy_(self._hosts[0], non_blocking=True)
        return GraphCycles._launch(self._cycles, rows)

    def _accept_drafts(
        self,
        row_meta: Tensor,
        counting: Tensor,
        starts: Tensor,
        positions: Tensor,
        drafted: Tensor,
        scores: Tensor,
        following: Tensor,
        logits: Tensor,
        gaps: Tensor,
        branches: int,
        device_state: Tensor,
        next_state: Tensor,
    ) -> None:
        rows = torch.arange(row_meta.shape[1], device=row_meta.device)
        accepted, begins = self._accepted[rows // branches], starts[rows - rows % branches].long()
        begins = begins.clamp(max=len(following) - 1)  # padding
        at = (begins + accepted).clamp(max=len(following) - 1)
        next_state.copy_(torch.stack((following[at], positions[begins] + accepted + 1)))
        device_state[:2, : len(rows)] = next_state
