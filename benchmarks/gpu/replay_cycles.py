"""Replayed acceptance in CUDA graphs, where the next cycle starts before the result of the last one is read.

The next cycle starts after the last accepted draft, and drafts of a model without trained exits are never accepted. So,
before cycles are captured, the op that computes the next state is replaced by one that reads the number of accepted
drafts from a tensor; each launch fills the tensor with the next counts of the trace. All drafts are made and verified.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tide_core.batch import DraftCounts, RowResult, RowStep
from tide_core.execution.graphs.cycle import CapturedCycles
from tide_core.execution.graphs.cycle_graph import CycleGraph
from tide_core.execution.graphs.cycle_shape import CycleRoom, RowPlace
from tide_core.execution.graphs.in_flight import Flight
from tide_core.exits.accept import Drafted, Settler
from tide_core.kernels.reference.cycle import MOST_ROWS

Cycle = tuple[int, int]
"""Numbers of drafted and accepted tokens of one row."""


class ReplayedCycles:
    """Cycles whose rows accept the numbers of drafts of a trace."""

    def __init__(self, cycles: CapturedCycles, trace: Sequence[Cycle]) -> None:
        self._cycles, self._trace = cycles, itertools.cycle(trace)
        self.cycles: list[Cycle] = []
        self._graphs: dict[CycleRoom, CycleGraph] = {}
        device = cycles._cache.device
        self._accepted = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(MOST_ROWS, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(4)]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Replay inside of this context."""
        cycles, before = self._cycles, (self._cycles._kernels, self._cycles._cycles)
        cycles.forget()
        cycles._kernels, cycles._cycles = replace(before[0], carry_on=self._carry_on), self._graphs
        cycles.__dict__["_fly"] = self._fly
        try:
            yield
        finally:
            del cycles.__dict__["_fly"]
            cycles._kernels, cycles._cycles = before
            cycles.forget()

    def _fly(self, rows: Sequence[RowPlace], legs: int = 1) -> Flight:
        """One step per launch: each step has its own counts."""
        accepted = [min(next(self._trace)[1], row.drafts) for row in rows]
        self._hosts.append(self._hosts.pop(0))  # the buffer that was used longest ago
        self._hosts[0][: len(rows)] = torch.tensor(accepted)
        self._accepted.copy_(self._hosts[0], non_blocking=True)
        flight = CapturedCycles._fly(self._cycles, rows)
        tables = (id(row.step.table) for row in rows)
        flight.settler = cast(
            Settler, ReplayedAcceptance(flight.settler, dict(zip(tables, accepted, strict=True)), self.cycles)
        )
        return flight

    def _carry_on(
        self,
        row_meta: Tensor,
        starts: Tensor,
        positions: Tensor,
        drafted: Tensor,
        following: Tensor,
        branches: int,
        next_state: Tensor,
        following_rows: Tensor,
    ) -> None:
        rows = torch.arange(row_meta.shape[1], device=row_meta.device)
        accepted, begins = self._accepted[rows // branches], starts[rows - rows % branches].long()
        begins = begins.clamp(max=len(following) - 1)  # padding
        at = (begins + accepted).clamp(max=len(following) - 1)
        following_rows.copy_(torch.stack((following[at], positions[begins] + accepted + 1)))
        next_state[:, : len(rows)] = following_rows


@dataclass(frozen=True, slots=True)
class ReplayedAcceptance:
    """Acceptance of a given number of drafts of each row."""

    rule: Settler
    accepted: Mapping[int, int]
    cycles: list[Cycle]

    def plain(self, best: float, best_id: int) -> RowResult:
        return self.rule.plain(best, best_id)

    def row(
        self,
        step: RowStep,
        drafts: int,
        drafted: Drafted,
        best: Sequence[float],
        best_ids: tuple[int, ...],
        **how: Any,
    ) -> RowResult:
        got = self.rule.row(step, drafts, drafted, best, best_ids, **how)
        if got.error is not None or not drafts:
            return got
        accepted = self.accepted[id(step.table)]
        self.cycles.append((drafts, accepted))
        # Token ids do not matter, except for the last: the device continues with it.
        last = replace(got.tokens[-1], token_id=best_ids[accepted])
        counts = DraftCounts(drafts, accepted, got.counts[0].non_finite, drafts)
        return RowResult.of((last,) * (accepted + 1), 1 + accepted, got.layers_run, (counts,))
