"""A whole cycle on a GPU as one launch and one read, for rows that decode.

Where no layer is skipped and logits are taken as the model makes them, the host has nothing to say between the first
draft and the last layer: each draft pass begins with the token the one before it chose, and the deep pass runs the
newest token and all drafts of every row through all layers. The first layers are run again there: the newest token
needs them anyway, and reading their weights takes as long for one token as for several. A row that may not draft is one
with a number of drafts of 0, so that a step at full depth is such a cycle too.

Rows that draw at random are given beforehand all the numbers they may need, and their drafts are judged on the device
(`cycle_choice`). A cycle with such a row has a graph of its own kind.

Then the host reads what every pass said, and `greedy` makes results of it, while the device does what is left: what
exits remember of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tide_core.batch import RowResult, RowStep
from tide_core.engine.branches import Branches, branches_for
from tide_core.engine.captured_pass import FEWEST_BLOCKS, TOKEN_SIZES, blocks_for, size_for
from tide_core.engine.cycle_graph import CycleGraph
from tide_core.engine.cycle_room import CycleRoom
from tide_core.engine.exits import Exits
from tide_core.engine.greedy import Drafted, Settler
from tide_core.engine.policy import changes_logits
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import FEW_QUERIES
from tide_core.models.adapter import ModelAdapter

Reading = Callable[[], list[RowResult]]


class CapturedCycles:
    """Cycles by their shape, each made when it is first wanted. Graphs share memory: one runs at a time."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None = None,
        *,
        branches: bool = False,
        capture: bool | None = None,
    ) -> None:
        """`exits` of one checkpoint. With `branches` the last blocks of the pool are for them alone. Without `capture`
        the same passes run op by op, as they do on a CPU."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self._capture = cache.device.type == "cuda" if capture is None else capture
        self._cycles: dict[CycleRoom, CycleGraph] = {}
        self._pool: Any = None
        self._branches = Branches(cache, kernels) if exits is not None and branches else None
        layer = adapter.num_layers if exits is None else exits.checkpoints[0].layer
        self._settler = Settler(layer, adapter.num_layers)

    def rooms(self, max_rows: int, max_drafts: int) -> list[CycleRoom]:
        """The shapes that texts of no great length come in."""
        sizes = [size for size in TOKEN_SIZES if size <= size_for(min(max_rows, TOKEN_SIZES[-1]))]
        drafts = range(1 if self._exits is None else max_drafts + 1)
        shapes = [(size, count) for size in sizes for count in drafts if size * (count + 1) <= TOKEN_SIZES[-1]]
        # With branches and without: rows that end draft fewer tokens than others, and then there are none.
        likeliest = dict.fromkeys(
            self._room(size, count, FEWEST_BLOCKS, branch=branch) for size, count in shapes for branch in (True, False)
        )
        return [*likeliest, *(CycleRoom(size, count, FEWEST_BLOCKS, draws=True) for size, count in shapes)]

    @torch.inference_mode()
    def prepare(self, room: CycleRoom) -> None:
        """Make a cycle before anybody waits for it: it takes some hundredths of a second."""
        self._ready(room, ())

    @staticmethod
    def takes(row: RowStep) -> bool:
        """Whether all that follows for this row can be known on the device."""
        params = row.request.params
        return (
            len(row.token_ids) == 1
            and row.samples
            and row.num_drafts < FEW_QUERIES
            and not row.policy.skips_layers
            and params.logprobs is None
            and not changes_logits(params)
        )

    def start(self, rows: Sequence[RowStep]) -> Started:
        """Begin a cycle of these rows, to be read before the next one is started."""
        drafts = [row.num_drafts for row in rows]
        limit = _most_rows(max(drafts))
        order = list(range(len(rows)))
        if drafts.count(drafts[0]) != len(drafts):
            order.sort(key=lambda r: -drafts[r])
        groups = [order[at : at + limit] for at in range(0, len(order), limit)]
        return Started(rows, groups, self._launch)

    def _launch(self, rows: Sequence[RowStep]) -> Reading:
        size = self._cache.block_size
        blocks = max([row.table.num_valid + row.num_drafts for row in rows]) // size + 1
        if not all([row.request.params.is_greedy for row in rows]):
            # Branches try the likeliest tokens, and a draw must not know which of them full depth will say.
            room = CycleRoom(size_for(len(rows)), rows[0].num_drafts, blocks_for(blocks), draws=True)
        else:
            # A row that drafts fewer tokens than another gets no branches: they would all be the same.
            even = rows[0].num_drafts == rows[-1].num_drafts
            room = self._room(len(rows), rows[0].num_drafts, blocks_for(blocks), branch=even)
        cycle, begins = self._ready(room, rows)
        cycle.replay(remembers=any([row.policy.may_exit for row in rows]))
        return lambda: self._results(rows, begins, cycle)

    def _room(self, num_rows: int, drafts: int, blocks: int, *, branch: bool = True) -> CycleRoom:
        size = self._cache.block_size
        each = branches_for(num_rows, drafts, size) if self._branches is not None and branch else 1
        rows = size_for(num_rows * each)
        return CycleRoom(rows, drafts, blocks) if each == 1 else CycleRoom(rows, drafts, blocks, each, size)

    def _ready(self, room: CycleRoom, rows: Sequence[RowStep]) -> tuple[CycleGraph, list[int]]:
        """The cycle of this shape, loaded, and where the tokens of each row begin in its deep pass."""
        cycle = self._cycles.get(room)
        if cycle is None:
            parts = self._adapter, self._cache, self._kernels, self._exits, self._branches
            cycle = self._cycles[room] = CycleGraph(*parts, room)
        cycle.wait()
        begins = cycle.rows.fill(rows)
        if self._capture and not cycle.is_captured:
            cycle.capture(self._pool)
            self._pool = cycle.pool
        return cycle, begins

    def _results(self, rows: Sequence[RowStep], begins: Sequence[int], cycle: CycleGraph) -> list[RowResult]:
        token_ids, best_ids, scores, best = cycle.read()
        if not cycle.room.drafts:
            return list(map(self._settler.plain, best[: len(rows)], best_ids))
        each, results = cycle.room.branches, []
        by_place = list(map(Drafted, zip(*scores, strict=True), zip(*token_ids, strict=True)))
        for index, row in enumerate(rows):
            count, place = row.num_drafts, index * each
            # The branch whose first draft is what full depth says. A token that leaves for good is the likeliest.
            if each > 1 and row.policy.exit_thresholds[0] > 1.0:
                place += _branch_of(best_ids[begins[place]], token_ids[0][place : place + each])
            begin = begins[place]
            end = begin + count + 1
            said = best[begin:end], best_ids[begin:end]
            results.append(self._settler.row(row, by_place[place], *said, branches=each))
        return results


def _branch_of(right: int, tried: Sequence[int]) -> int:
    """The branch that has tried what is right first, or else the first."""
    return tried.index(right) if right in tried else 0


@functools.cache
def _most_rows(drafts: int) -> int:
    """That one launch takes, with so many drafts of each."""
    return max(size for size in TOKEN_SIZES if size * (drafts + 1) <= TOKEN_SIZES[-1])


class Started:
    """A cycle on its way. More rows than one launch can take go in several, each when the one before it was read."""

    def __init__(self, rows: Sequence[RowStep], groups: list[list[int]], launch: Callable[..., Reading]) -> None:
        self._rows, self._groups, self._launch = rows, groups, launch
        self._reading = self._next() if groups else None

    def _next(self) -> Reading:
        return self._launch([self._rows[r] for r in self._groups[0]])

    def results(self) -> list[RowResult]:
        """Wait for the device; one result for each row."""
        found: dict[int, RowResult] = {}
        while self._reading is not None:
            found.update(zip(self._groups.pop(0), self._reading(), strict=True))
            self._reading = self._next() if self._groups else None
        return [found[r] for r in range(len(self._rows))]
