"""Captured cycles without a device: all that the host does for them, and in the model's place ids that are ready.

Every draft is right, and every cycle is launched ahead of the one that is read, as on a GPU with nothing in its way.
What a launch itself takes (a copy, a graph, an event) is not in it.
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
    """Cycles whose graphs are ready at once; `seconds` is the time they took for that."""

    def __init__(self, ids: Sequence[int], num_layers: int, block_size: int) -> None:
        adapter: Any = SimpleNamespace(num_layers=num_layers, max_positions=MAX_POSITIONS)
        cache: Any = SimpleNamespace(device=torch.device("cpu"), block_size=block_size)
        exits: Any = SimpleNamespace(checkpoints=[SimpleNamespace(layer=EXIT_LAYER)])
        super().__init__(adapter, cache, SimpleNamespace(), exits)  # type: ignore[arg-type]
        self.ids, self.seconds = np.array(ids), 0.0
        self.carried = np.zeros(1, dtype=np.int64)
        """Positions that the rows of the last cycle go on with."""
        self._graphs: dict[CycleRoom, ReadyGraph] = {}

    def _ready(self, room: CycleRoom) -> Any:
        if room not in self._graphs:
            self._graphs[room] = ReadyGraph(self, room)
        return self._graphs[room]


class ReadyGraph:
    """What `CycleGraph` is to the host."""

    def __init__(self, owner: ReadyCycles, room: CycleRoom) -> None:
        self._owner, self._room = owner, room
        self._said = CycleSaid(room.rows, room.drafts, torch.device("cpu"))
        self._sides = [Side(room, self._said, torch.device("cpu")) for _ in range(2)]
        self._said.scores.fill_(0.9)
        self._said.best.fill_(1.0)

    def launch(self, rows: Sequence[RowPlace], legs: int = 1) -> tuple[Side, list[int]]:
        self._sides.reverse()
        side = self._sides[0]
        side.wait()
        begins = side.rows.fill(rows)
        before = time.perf_counter()
        about, _ = self._room.split(side.host.numpy())
        starts, drafts = about[1, : len(begins)].astype(np.int64), about[2, : len(begins)]
        behind = starts < 0
        starts[behind] = self._owner.carried[-1 - starts[behind]]
        for leg in range(legs):
            self._run(self._owner.carried if leg else starts, drafts, begins)
            self._said.send(side.landing(leg))
        self._owner.seconds += time.perf_counter() - before
        side.note_sent(legs)
        return side, begins

    def _run(self, starts: Array, drafts: Array, begins: Sequence[int]) -> None:
        """The token at a position is that of the text there."""
        owner, said, num = self._owner, self._said, len(begins)
        for place in range(num):
            start, begin, count = int(starts[place]), begins[place], int(drafts[place])
            following = torch.from_numpy(owner.ids[start + 1 : start + count + 2])
            said.following[begin : begin + count + 1] = following
            said.drafted[:count, place] = following[:count]
        owner.carried = starts + drafts + 1
        said.going_on[0, :num] = torch.from_numpy(owner.ids[owner.carried])
        said.going_on[1, :num] = torch.from_numpy(owner.carried)


class ReadyRunner(ModelRunner):
    """The engine's runner over such cycles; prompts are as ready."""

    def __init__(self, ids: Sequence[int], num_layers: int, block_size: int, legs: int) -> None:
        self._ready = ReadyCycles(ids, num_layers, block_size)
        self._ready.paces = Paces(lambda: Pace(legs))  # without a device nobody changes it
        parts: Any = SimpleNamespace(num_layers=num_layers, gathers_kv=True)
        super().__init__(parts, parts, parts, (range(num_layers),), captured_cycles=self._ready)
        self._ids, self._settler = ids, Settler(EXIT_LAYER, num_layers)
        self.row_steps = 0

    @property
    def seconds(self) -> float:
        return self._ready.seconds

    def run(self, batch: ScheduledBatch) -> StepResult:
        """A row's cycles count as steps, as they would be without legs."""
        result = super().run(batch)
        self.row_steps += sum(len(row.counts) for row in result.rows)
        return result

    def _run_rows(self, steps: Sequence[RowStep]) -> list[RowResult]:
        before = time.perf_counter()
        ready = [self._settler.prompt(step, 1.0, self._ids[step.start + len(step.token_ids)]) for step in steps]
        self._ready.seconds += time.perf_counter() - before
        return ready
