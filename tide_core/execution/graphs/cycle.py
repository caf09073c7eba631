"""A whole cycle on a GPU as one launch and one read, for rows that decode.

Where no layer is skipped and logits are taken as the model makes them, the host has nothing to say between the first
draft and the last layer: each draft pass begins with the token the one before it chose, and the deep pass runs the
newest token and all drafts of every row through all layers. The first layers are run again there: the newest token
needs them anyway, and reading their weights takes as long for one token as for several. A row that may not draft is one
with a number of drafts of 0, so that a step at full depth is such a cycle too.

Rows that draw at random are given beforehand all the numbers they may need, and their drafts are judged on the device
(`cycle_choice`). A cycle with such a row has a graph of its own kind.

Then the host reads what every pass said, and `greedy` makes results of it. Meanwhile the device need not wait: where
rows are going to go on, the next cycle is launched before this one is read, behind what the device itself carries from
one to the other (`cycle_flight`). Where the host is the slower one, several are launched at a time (`pace`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tide_core.batch import RowResult, RowStep
from tide_core.execution.graphs.base import FEWEST_BLOCKS, TOKEN_SIZES, blocks_for, size_for
from tide_core.execution.graphs.branches import Branches, branches_for
from tide_core.execution.graphs.cycle_graph import CycleGraph
from tide_core.execution.graphs.cycle_shape import CycleRoom, RowPlace
from tide_core.execution.graphs.in_flight import Flight
from tide_core.execution.graphs.launch_depth import MOST_LEGS, Pace, Paces
from tide_core.exits.accept import Settler
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import MOST_ROWS
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import FEW_QUERIES
from tide_core.models.adapter import ModelAdapter

Reading = Callable[[], list[RowResult]]
NOTHING_YET = RowResult()


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
        max_positions: int | None = None,
    ) -> None:
        """`exits` of one checkpoint. With `branches` the last blocks of the pool are for them alone. Without `capture`
        the same passes run op by op, as they do on a CPU. No row is run at `max_positions` or behind; by default those
        of the model."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self._capture = cache.device.type == "cuda" if capture is None else capture
        self._cycles: dict[CycleRoom, CycleGraph] = {}
        self._pool: Any = None
        self._branches = Branches(cache, kernels) if exits is not None and branches else None
        self._carried = torch.zeros((2, MOST_ROWS), dtype=torch.int32, device=cache.device)
        layer = adapter.num_layers if exits is None else exits.checkpoints[0].layer
        self._settler = Settler(layer, adapter.num_layers)
        self._max_positions = adapter.max_positions if max_positions is None else max_positions
        self._ahead: Flight | None = None
        self.paces = Paces()
        self._pace = Pace()
        """Of the rows that run now."""
        self.waited_s, self.most_legs = 0.0, 1
        """For the last flight that was read, and how many legs such a one may have."""
        self._read_at: float | None = None

    def rooms(self, max_rows: int, max_drafts: int) -> list[CycleRoom]:
        """The shapes that texts of no great length come in."""
        sizes = [size for size in TOKEN_SIZES if size <= size_for(min(max_rows, TOKEN_SIZES[-1]))]
        drafts = range(1 if self._exits is None else max_drafts + 1)
        shapes = [(size, count) for size in sizes for count in drafts if size * (count + 1) <= TOKEN_SIZES[-1]]
        # With branches and without: rows that end draft fewer tokens than others, and then there are none.
        both = (True, False)
        likeliest = dict.fromkeys(
            self._room(size, count, FEWEST_BLOCKS, branch=branch, remembers=remembers)
            for size, count in shapes
            for branch in both
            for remembers in both
        )
        drawing = (
            self._room(size, count, FEWEST_BLOCKS, remembers=remembers, draws=True)
            for size, count in shapes
            for remembers in both
        )
        return [*likeliest, *dict.fromkeys(drawing)]

    @torch.inference_mode()
    def prepare(self, room: CycleRoom) -> None:
        """Make a cycle before anybody waits for it: it takes some hundredths of a second."""
        self._ready(room)

    @staticmethod
    def takes(row: RowStep) -> bool:
        """Whether all that follows for this row can be known on the device."""
        return (
            len(row.token_ids) == 1
            and row.samples
            and row.num_drafts < FEW_QUERIES
            and row.request.wants_tokens_alone
            and not row.policy.skips_layers
        )

    @staticmethod
    @functools.cache
    def most_rows(drafts: int) -> int:
        """That one launch takes, with so many drafts of each."""
        return max(size for size in TOKEN_SIZES if size * (drafts + 1) <= TOKEN_SIZES[-1])

    def start(self, rows: Sequence[RowStep], *, goes_on: bool = False) -> Started:
        """Begin a flight of these rows, or take the one that runs them already; it must be read before the next but one
        is begun. With `goes_on` the one behind it is begun as well, if that can be: rows that are new then have to wait
        for it and get nothing as yet."""
        flight, self._ahead = self._ahead, None
        found = {} if flight is None else flight.find(rows)
        drafts = [row.num_drafts for row in rows]
        groups = _groups(drafts, [r for r in range(len(rows)) if r not in found])
        pace = self.paces.of(len(rows), any(drafts))
        if pace is not self._pace or not found:
            self._pace = pace
            pace.begin()
        if flight is None or not found:
            self._read_at = None
            mine = groups.pop(0)
            flight = self._fly([self._place(rows[r]) for r in mine])
            found = dict(zip(mine, range(len(mine)), strict=True))
            goes_on = goes_on and not groups
        if goes_on:
            flight.ahead = self._ahead = self._go_on(rows, flight, found)
            groups = groups if self._ahead is None else []
        return Started(rows, groups, self._launch, (list(found), functools.partial(self._read, flight, found, rows)))

    def _read(self, flight: Flight, found: dict[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        before = time.perf_counter()
        flight.side.wait()
        now = time.perf_counter()
        self.waited_s, self.most_legs = now - before, MOST_LEGS if flight.each == 1 else 1
        if self._read_at is not None and flight.pace is self._pace and (ran_s := flight.side.ran_s()) is not None:
            self._pace.note(flight.legs, ran_s, self.waited_s, now - self._read_at)
        self._read_at = now if self.runs_ahead else None
        return flight.results(found, rows)

    @property
    def runs_ahead(self) -> bool:
        """Whether the device has a cycle to run behind the one that was read last."""
        return self._ahead is not None and self._cache.device.type == "cuda"

    def forget(self) -> None:
        """Nothing of what was begun is of use any more."""
        self._ahead = self._read_at = None
        self._pace.begin()

    def cycles_ahead(self) -> int:
        """As `ModelRunner` has it."""
        return (1 if self._ahead is None else self._ahead.legs) + self._pace.legs - 1

    def _launch(self, rows: Sequence[RowStep]) -> Reading:
        flight = self._fly([self._place(row) for row in rows])
        return functools.partial(flight.results, {r: r for r in range(len(rows))}, rows)

    def _place(self, row: RowStep) -> RowPlace:
        table, drafts = row.table, row.num_drafts
        return RowPlace(row, drafts, table.block_ids[: (table.num_valid + drafts) // self._cache.block_size + 1])

    def _go_on(self, rows: Sequence[RowStep], flight: Flight, found: dict[int, int]) -> Flight | None:
        """Begin the flight behind another: with the rows that it runs, as it leaves them, and with those that are new.
        None where it cannot be known what a row goes on with, or has no room for it, or if all may end before."""
        size, longest = self._cache.block_size, self._max_positions
        going: list[tuple[int, int, int, RowStep]] = []
        is_worth_it, legs, most = False, self._pace.legs, 0
        for index, row in enumerate(rows):
            request, table = row.request, row.table
            if not (request.is_foreseeable and row.policy.is_lossless):
                return None
            left = request.params.max_tokens - len(row.output_ids)
            number = found.get(index)
            behind, gained = -1, 0
            if number is not None:
                behind, gained = number * flight.each, flight.legs * (flight.rows[number].drafts + 1)
            is_worth_it |= left > gained
            if number is not None:
                left -= flight.legs  # at least
                if left < 1:
                    continue
            most = left if left > most else most
            drafts = row.num_drafts if row.num_drafts < left else left - 1
            start, room = table.lengths[-1] + gained, len(table.block_ids) * size
            fits = ((room if room < longest else longest) - start) // (drafts + 1)
            if fits < legs:
                legs = fits
            going.append((drafts, behind, start, row))
        if not is_worth_it or legs < 1:
            return None
        going.sort(key=_drafts_of, reverse=True)
        has_branches = self._branches is not None and branches_for(len(going), going[0][0], size) > 1
        legs = 1 if has_branches else min(legs, most)  # each gives a token at least
        places = [
            RowPlace(row, drafts, row.table.block_ids[: (start + legs * (drafts + 1) - 1) // size + 1], behind)
            for drafts, behind, start, row in going
        ]
        return self._fly(places, legs) if len(places) <= self.most_rows(places[0].drafts) else None

    def _fly(self, rows: Sequence[RowPlace], legs: int = 1) -> Flight:
        """By falling number of drafts. With branches it has one leg."""
        drafts = rows[0].drafts
        # Branches try the likeliest tokens, and a draw must not know which of them full depth will say. A row that
        # drafts fewer tokens than another gets none either: they would all be the same.
        draws = not all([row.step.request.params.is_greedy for row in rows])
        room = self._room(
            len(rows),
            drafts,
            blocks_for(max([len(row.blocks) for row in rows])),
            branch=drafts == rows[-1].drafts,
            remembers=any([row.step.policy.may_exit for row in rows]),
            draws=draws,
        )
        legs = legs if room.branches == 1 else 1
        return Flight(rows, room.branches, *self._ready(room).launch(rows, legs), self._settler, legs, self._pace)

    def _room(
        self, num_rows: int, drafts: int, blocks: int, *, branch: bool = True, remembers: bool, draws: bool = False
    ) -> CycleRoom:
        each = 1
        if self._branches is not None and branch and not draws:
            each = branches_for(num_rows, drafts, self._cache.block_size)
        remembers = self._exits is not None and (remembers or drafts > 0)
        return CycleRoom(size_for(num_rows * each), drafts, blocks, each, remembers, draws)

    def _ready(self, room: CycleRoom) -> CycleGraph:
        """The cycle of this shape."""
        cycle = self._cycles.get(room)
        if cycle is None:
            parts = self._adapter, self._cache, self._kernels, self._exits, self._branches
            cycle = self._cycles[room] = CycleGraph(*parts, room, self._carried)
        if self._capture and not cycle.is_captured:
            cycle.capture(self._pool)
            self._pool = cycle.pool
        return cycle


def _drafts_of(row: tuple[int, int, int, RowStep]) -> int:
    return row[0]


def _groups(drafts: Sequence[int], which: list[int]) -> list[list[int]]:
    """These rows by falling number of drafts, as many at a time as one launch takes."""
    if not which:
        return []
    which.sort(key=lambda r: -drafts[r])
    limit = CapturedCycles.most_rows(drafts[which[0]])
    return [which[at : at + limit] for at in range(0, len(which), limit)]


class Started:
    """Rows on their way. More of them than one launch can take go in several, each when the one before it was read."""

    def __init__(
        self,
        rows: Sequence[RowStep],
        groups: list[list[int]],
        launch: Callable[[list[RowStep]], Reading],
        running: tuple[list[int], Reading] | None = None,
        is_done: Callable[[], bool] | None = None,
    ) -> None:
        """`running` is launched already. With `is_done` nobody waits for it before it is."""
        self._rows, self._groups, self._launch = rows, groups, launch
        self._running = self._next() if running is None else running
        self._is_done = is_done

    def _next(self) -> tuple[list[int], Reading] | None:
        if not self._groups:
            return None
        group = self._groups.pop(0)
        return group, self._launch([self._rows[r] for r in group])

    def results(self) -> list[RowResult]:
        """Wait for the device; one result for each row."""
        found: dict[int, RowResult] = {}
        if self._is_done is not None and not self._is_done():
            self._running = None
        while self._running is not None:
            group, reading = self._running
            found.update(zip(group, reading(), strict=True))
            self._running = self._next()
        return [found.get(r, NOTHING_YET) for r in range(len(self._rows))]
