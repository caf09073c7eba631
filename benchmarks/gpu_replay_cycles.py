"""Replayed acceptance where the next cycle begins before the last one is read: there the device must be told as well.

A cycle goes on where the last draft that is right ends, and drafts of a model without trained exits never are. So the
op that finds this place is replaced, before cycles are captured, by one that takes it from a tensor; each launch fills
that with the next counts of the trace. What else a cycle does is as ever, all its drafts made and verified.
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
"""Drafted and accepted by one row."""


class ReplayedCycles:
    """Cycles whose rows accept what a trace says, and not what is right."""

    def __init__(self, cycles: CapturedCycles, trace: Sequence[Cycle]) -> None:
        self._cycles, self._trace = cycles, itertools.cycle(trace)
        self.cycles: list[Cycle] = []
        self._graphs: dict[CycleRoom, CycleGraph] = {}
        device = cycles._cache.device
        self._accepted = torch.zeros(MOST_ROWS, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(MOST_ROWS, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(4)]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """As long as this lasts; then cycles are what they were."""
        cycles, own = self._cycles, (self._cycles._kernels, self._cycles._cycles)
        cycles.forget()
        cycles._kernels, cycles._cycles = replace(own[0], carry_on=self._carry_on), self._graphs
        cycles.__dict__["_fly"] = self._fly
        try:
            yield
        finally:
            del cycles.__dict__["_fly"]
            cycles._kernels, cycles._cycles = own
            cycles.forget()

    def _fly(self, rows: Sequence[RowPlace], legs: int = 1) -> Flight:
        """Of one leg: each is told its own counts."""
        accepted = [min(next(self._trace)[1], row.drafts) for row in rows]
        self._hosts.append(self._hosts.pop(0))  # that of the launch before the last but one
        self._hosts[0][: len(rows)] = torch.tensor(accepted)
        self._accepted.copy_(self._hosts[0], non_blocking=True)
        flight = CapturedCycles._fly(self._cycles, rows)
        tables = (id(row.step.table) for row in rows)
        flight.settler = cast(Settler, Told(flight.settler, dict(zip(tables, accepted, strict=True)), self.cycles))
        return flight

    def _carry_on(
        self,
        about: Tensor,
        starts: Tensor,
        positions: Tensor,
        drafted: Tensor,
        following: Tensor,
        branches: int,
        carried: Tensor,
        following_rows: Tensor,
    ) -> None:
        rows = torch.arange(about.shape[1], device=about.device)
        accepted, begins = self._accepted[rows // branches], starts[rows - rows % branches].long()
        begins = begins.clamp(max=len(following) - 1)  # of no row
        at = (begins + accepted).clamp(max=len(following) - 1)
        following_rows.copy_(torch.stack((following[at], positions[begins] + accepted + 1)))
        carried[:, : len(rows)] = following_rows


@dataclass(frozen=True, slots=True)
class Told:
    """A settler that is told how many drafts of each row are accepted."""

    own: Settler
    accepted: Mapping[int, int]
    cycles: list[Cycle]

    def plain(self, best: float, best_id: int) -> RowResult:
        return self.own.plain(best, best_id)

    def row(
        self,
        step: RowStep,
        drafts: int,
        drafted: Drafted,
        best: Sequence[float],
        best_ids: tuple[int, ...],
        **how: Any,
    ) -> RowResult:
        got = self.own.row(step, drafts, drafted, best, best_ids, **how)
        if got.error is not None or not drafts:
            return got
        accepted = self.accepted[id(step.table)]
        self.cycles.append((drafts, accepted))
        # What the tokens say is of no interest, but for the last: the device goes on with it.
        last = replace(got.tokens[-1], token_id=best_ids[accepted])
        counts = DraftCounts(drafts, accepted, got.counts[0].non_finite, drafts)
        return RowResult.of((last,) * (accepted + 1), 1 + accepted, got.layers_run, (counts,))
