"""A whole cycle on a GPU as one launch and one read, for rows that decode.

Where no layer is skipped and logits are taken as the model makes them, the host has nothing to say between the first
draft and the last layer: each draft pass begins with the token the one before it chose, and the deep pass runs the
newest token and all drafts of every row through all layers. The first layers are run again there: the newest token
needs them anyway, and reading their weights takes as long for one token as for several. A row that may not draft is one
with a number of drafts of 0, so that a step at full depth is such a cycle too.

Rows that draw at random are given beforehand all the numbers they may need, and their drafts are judged on the device
(`cycle_choice`). A cycle with such a row has a graph of its own kind.

Then the host reads what every pass said, and `greedy` makes results of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tide_core.batch import RowResult, RowStep
from tide_core.engine.branches import Branches, branches_for
from tide_core.engine.captured_pass import FEWEST_BLOCKS, TOKEN_SIZES, Buffer, Replayed, blocks_for, size_for
from tide_core.engine.cycle_choice import CycleChoice, Drawn, Likeliest
from tide_core.engine.cycle_room import CycleRoom, CycleRows
from tide_core.engine.cycle_said import CycleSaid, Said
from tide_core.engine.deep_pass import Kept, run_deep
from tide_core.engine.exits import Exits
from tide_core.engine.greedy import Drafted, Settler
from tide_core.engine.policy import changes_logits
from tide_core.kernels import CudaKernels, cycle_plan
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import FEW_QUERIES, KernelView
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
        self._cycles: dict[CycleRoom, _Cycle] = {}
        self._pool: Any = None
        self._branches = Branches(cache, kernels) if exits is not None and branches else None
        layer = adapter.num_layers if exits is None else exits.checkpoints[0].layer
        self._settler = Settler(layer, adapter.num_layers)

    def rooms(self, max_rows: int, max_drafts: int) -> list[CycleRoom]:
        """The shapes that texts of no great length come in."""
        sizes = [size for size in TOKEN_SIZES if size <= size_for(min(max_rows, TOKEN_SIZES[-1]))]
        drafts = range(1 if self._exits is None else max_drafts + 1)
        shapes = [(size, count) for size in sizes for count in drafts if size * (count + 1) <= TOKEN_SIZES[-1]]
        likeliest = dict.fromkeys(self._room(size, count, FEWEST_BLOCKS) for size, count in shapes)
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
            and row.policy.mode != "fast"
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
        blocks = max([row.table.lengths[-1] + row.num_drafts for row in rows]) // size + 1
        if not all([row.request.params.temperature == 0.0 for row in rows]):
            # Branches try the likeliest tokens, and a draw must not know which of them full depth will say.
            room = CycleRoom(size_for(len(rows)), rows[0].num_drafts, blocks_for(blocks), draws=True)
        else:
            # A row that drafts fewer tokens than another gets no branches: they would all be the same.
            even = rows[0].num_drafts == rows[-1].num_drafts
            room = self._room(len(rows), rows[0].num_drafts, blocks_for(blocks), branch=even)
        cycle, begins = self._ready(room, rows)
        cycle.replay()
        return lambda: self._results(rows, begins, cycle)

    def _room(self, num_rows: int, drafts: int, blocks: int, *, branch: bool = True) -> CycleRoom:
        size = self._cache.block_size
        each = branches_for(num_rows, drafts, size) if self._branches is not None and branch else 1
        rows = size_for(num_rows * each)
        return CycleRoom(rows, drafts, blocks) if each == 1 else CycleRoom(rows, drafts, blocks, each, size)

    def _ready(self, room: CycleRoom, rows: Sequence[RowStep]) -> tuple[_Cycle, list[int]]:
        """The cycle of this shape, loaded, and where the tokens of each row begin in its deep pass."""
        cycle = self._cycles.get(room)
        if cycle is None:
            parts = self._adapter, self._cache, self._kernels, self._exits, self._branches
            cycle = self._cycles[room] = _Cycle(*parts, room)
        cycle.wait()
        begins = cycle.rows.fill(rows)
        if self._capture and not cycle.is_captured:
            cycle.capture(self._pool)
            self._pool = cycle.pool
        return cycle, begins

    def _results(self, rows: Sequence[RowStep], begins: Sequence[int], cycle: _Cycle) -> list[RowResult]:
        token_ids, best_ids, scores, best = cycle.read()
        if not cycle.room.drafts:
            return list(map(self._settler.plain, best[: len(rows)], best_ids))
        each, results = cycle.room.branches, []
        by_place = list(map(Drafted, zip(*scores, strict=True), zip(*token_ids, strict=True)))
        for index, row in enumerate(rows):
            count, first = row.num_drafts, index * each
            rank = 0
            # The branch whose first draft is what full depth says. A token that leaves for good is the likeliest.
            if each > 1 and row.policy.exit_thresholds[0] > 1.0:
                tried = token_ids[0][first : first + each]
                right = best_ids[begins[first]]
                rank = tried.index(right) if right in tried else 0
            place, begin = first + rank, begins[first + rank]
            end = begin + count + 1
            result = self._settler.row(row, by_place[place], best[begin:end], best_ids[begin:end], branches=each)
            if rank and result.num_valid > 0:
                assert self._branches is not None
                blocks = cycle.rows.blocks[index * (each - 1) + rank - 1]
                self._branches.bring_back(row, blocks, result.num_valid)
            results.append(result)
        return results


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


class _Cycle(Replayed):
    """The passes of one shape, from the host's buffer to the host's results."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None,
        branches: Branches | None,
        room: CycleRoom,
    ) -> None:
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self.room, self._branches = room, branches
        self._buffer = Buffer.of(room.size, cache.device)
        self.rows = CycleRows(room, self._buffer.numpy, cache.block_size, branches)
        self._about, self._tables, self._ranks, self._copies = room.split(self._buffer.device)
        wide, narrow = cycle_plan.sizes(room.rows, room.drafts)
        self._wide = torch.empty(wide, dtype=torch.int64, device=cache.device)
        self._narrow = torch.empty(narrow, dtype=torch.int32, device=cache.device)
        self._parts = parts = cycle_plan.split(self._wide, self._narrow, room.rows, room.drafts)
        of_drafts = parts.draft_positions, parts.draft_slots, parts.draft_starts, parts.draft_lens
        self._drafts = [self._view(*(part[ahead] for part in of_drafts), queries=1) for ahead in range(room.drafts)]
        self._deep = self._view(parts.positions, parts.slots, parts.starts, parts.lens, queries=room.drafts + 1)
        self._said = CycleSaid(room.rows, room.drafts, cache.device)
        none = torch.empty(0, dtype=torch.int64, device=cache.device)
        self._shortlist = none if exits is None else exits.shortlist
        self._choice: CycleChoice = Likeliest(kernels)
        if room.draws:
            numbers = room.numbers(self._buffer.device, torch.float64)
            self._choice = Drawn(kernels, exits, self._about, parts, numbers)
        self._is_open = False

    def _view(self, *indices: torch.Tensor, queries: int) -> KernelView:
        view = KernelView.of_tensors(self._cache, self._kernels, (*indices, self._tables))
        view.limit(queries, self.room.blocks * self._cache.block_size)
        return view

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def wait(self) -> None:
        """Until the host may write: at once, unless what was launched last was never read."""
        if self._is_open and self._cache.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._is_open = False

    def capture(self, pool: Any) -> None:
        self._is_open = True  # it runs once beforehand
        super().capture(pool)

    def replay(self) -> None:
        self._is_open = True
        super().replay()

    def read(self) -> Said:
        self.wait()
        return self._said.read()

    def _run(self) -> None:
        self._buffer.device.copy_(self._buffer.host, non_blocking=True)
        size, drafts = self._cache.block_size, self.room.drafts
        self._kernels.plan_cycle(self._about, self._tables, size, drafts, self._wide, self._narrow)
        if self.room.branches > 1:
            assert self._branches is not None
            self._branches.copy(*self._copies)
        features = [self._draft(ahead, view) for ahead, view in enumerate(self._drafts)]
        said, parts = self._said, self._parts
        pending = parts.newest, said.places, self._shortlist, parts.sources
        self._kernels.pending_tokens(*pending, said.drafted, said.token_ids)
        if self._exits is not None and features:  # nobody has waited for the scores of the drafts
            self._exits.rate(torch.cat(features), said.all_peaks, said.scores.flatten())
        self._run_deep()
        said.send()

    def _draft(self, ahead: int, view: KernelView) -> torch.Tensor:
        """Say the next tokens, behind those the pass before said; the first pass begins with the newest ones. Returns
        what their scores follow from, [R, D]."""
        adapter, exits, parts, said = self._adapter, self._exits, self._parts, self._said
        assert exits is not None
        [checkpoint] = exits.checkpoints
        inputs = adapter.layer_inputs(view.positions, view)
        places, positions = said.places[ahead - 1], view.positions
        states = exits.enter(places, positions) if ahead else adapter.embed(parts.newest, positions)
        states = adapter.run_layers(states, 0, checkpoint.layer, inputs)[0]
        deep = parts.draft_deep_slots, parts.draft_distances[ahead]
        features, logits = exits.draft(view, states, *deep, said.peaks_of(ahead))
        if ahead == 0 and self.room.branches > 1:
            self._kernels.nth_best(logits, self._ranks[0], out=said.places[0])
        self._choice.draft(ahead, logits, said)
        return features

    def _run_deep(self) -> None:
        """The largest logits behind the tokens that are pending, and what follows them."""
        parts = self._parts
        kept = Kept(parts.kept_slots, parts.deep_slots, parts.distances)
        normed = run_deep(self._adapter, self._deep, self._said.token_ids, self._exits, kept)
        self._choice.settle(self._adapter.head(normed), self._said)
