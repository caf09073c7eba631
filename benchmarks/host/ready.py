"""The host code of cycles in CUDA graphs, without a device: a stub in place of each graph returns ids that are ready.

Every draft is accepted, and every cycle is launched before the result of the last one is read, as on a GPU. The cost of
a launch itself (a copy, a graph, an event) is not included. This file depends on the internals of the graph path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.execution.graphs.cycle import CapturedCycles
from tide_core.execution.graphs.cycle_graph import Side
from tide_core.execution.graphs.cycle_output import CycleSaid
from tide_core.execution.graphs.cycle_shape import Array, CycleRoom, RowPlace
from tide_core.execution.graphs.launch_depth import Pace, Paces
from tide_core.execution.runner import ModelRunner
from tide_core.exits.accept import Settler

EXIT_LAYER, MAX_POSITIONS = 2, 8192


class ReadyCycles(CapturedCycles):
    """Cycles over stubs of graphs; `seconds` is the stubs' own time."""

    def __init__(self, ids: Sequence[int], num_layers: int, block_size: int) -> None:
        adapter: Any = SimpleNamespace(num_layers=num_layers, max_positions=MAX_POSITIONS)
        cache: Any = SimpleNamespace(device=torch.device("cpu"), block_size=block_size)
        exits: Any = SimpleNamespace(checkpoints=[SimpleNamespace(layer=EXIT_LAYER)])
        super().__init__(adapter, cache, SimpleNamespace(), exits)  # type: ignore[arg-type]
        self.ids, self.seconds = np.array(ids), 0.0
        self.next_positions = np.zeros(1, dtype=np.int64)
        """Next position of each row of the last cycle."""
        self._graphs: dict[CycleRoom, ReadyGraph] = {}

    def _ready(self, shape: CycleRoom) -> Any:
        if shape not in self._graphs:
            self._graphs[shape] = ReadyGraph(self, shape)
        return self._graphs[shape]


class ReadyGraph:
    """A stub with the interface of `CycleGraph`."""

    def __init__(self, owner: ReadyCycles, shape: CycleRoom) -> None:
        self._owner, self._shape = owner, shape
        self._output = CycleSaid(shape.rows, shape.drafts, torch.device("cpu"))
        self._sides = [Side(shape, self._output, torch.device("cpu")) for _ in range(2)]
        self._output.scores.fill_(0.9)
        self._output.best.fill_(1.0)

    def launch(self, rows: Sequence[RowPlace], legs: int = 1) -> tuple[Side, list[int]]:
        self._sides.reverse()
        side = self._sides[0]
        side.wait()
        begins = side.rows.fill(rows)
        before = time.perf_counter()
        row_meta, _ = self._shape.split(side.host.numpy())
        starts, drafts = row_meta[1, : len(begins)].astype(np.int64), row_meta[2, : len(begins)]
        continued = starts < 0
        starts[continued] = self._owner.next_positions[-1 - starts[continued]]
        for step in range(legs):
            self._run(self._owner.next_positions if step else starts, drafts, begins)
            self._output.send(side.landing(step))
        self._owner.seconds += time.perf_counter() - before
        side.note_sent(legs)
        return side, begins

    def _run(self, starts: Array, drafts: Array, begins: Sequence[int]) -> None:
        """Output the tokens of the text at the rows' positions."""
        owner, output, num = self._owner, self._output, len(begins)
        for place in range(num):
            start, begin, count = int(starts[place]), begins[place], int(drafts[place])
            following = torch.from_numpy(owner.ids[start + 1 : start + count + 2])
            output.following[begin : begin + count + 1] = following
            output.drafted[:count, place] = following[:count]
        owner.next_positions = starts + drafts + 1
        output.going_on[0, :num] = torch.from_numpy(owner.ids[owner.next_positions])
        output.going_on[1, :num] = torch.from_numpy(owner.next_positions)


class ReadyRunner(ModelRunner):
    """The engine's runner over these cycles; results of prompts are ready too."""

    def __init__(self, ids: Sequence[int], num_layers: int, block_size: int, steps_per_launch: int) -> None:
        self._ready = ReadyCycles(ids, num_layers, block_size)
        self._ready.paces = Paces(lambda: Pace(steps_per_launch))  # without a device it stays
        parts: Any = SimpleNamespace(num_layers=num_layers, gathers_kv=True)
        super().__init__(parts, parts, parts, (range(num_layers),), captured_cycles=self._ready)
        self._ids, self._settler = ids, Settler(EXIT_LAYER, num_layers)
        self.row_steps = 0

    @property
    def seconds(self) -> float:
        return self._ready.seconds

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Each cycle of a row counts as a step."""
        result = super().run(batch)
        self.row_steps += sum(len(row.counts) for row in result.rows)
        return result

    def _run_rows(self, steps: Sequence[RowStep]) -> list[RowResult]:
        before = time.perf_counter()
        ready = [self._settler.prompt(step, 1.0, self._ids[step.start + len(step.token_ids)]) for step in steps]
        self._ready.seconds += time.perf_counter() - before
        return ready
