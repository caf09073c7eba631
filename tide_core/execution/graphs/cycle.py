"""Decoding rows on a GPU: a whole cycle as one graph launch and one read.

Where no layer is skipped, the host decides nothing between the first draft and the last layer: each draft pass begins
with the token that the one before chose, and the deep pass runs the newest token and all drafts of every row through
all layers. The first layers run again there: the newest token needs them anyway, and reading their weights takes as
long for one token as for several. A row that may not draft has a number of drafts of 0, so a step at full depth is a
cycle too. Sampling, logit adjustments and the acceptance rule run on the device. Only grammars need the host: it
computes what may follow while the deep pass runs, or replaces tokens that do not fit when it reads them (`masks`).

While the device works, the next cycle is launched before this one is read, since its start is known on the device
(`in_flight`). Where the host is slower than the device, several cycles are launched at once (`launch_depth`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from tide_core.batch import FEW_QUERIES, RowResult, RowStep, StepTiming
from tide_core.execution.graphs import adjust
from tide_core.execution.graphs.adjust import AdjustSlots
from tide_core.execution.graphs.base import MIN_BLOCKS, TOKEN_SIZES, blocks_for, size_for
from tide_core.execution.graphs.branches import Branches, branches_for
from tide_core.execution.graphs.cycle_graph import CycleGraph
from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace
from tide_core.execution.graphs.in_flight import InFlightStep, Launched, Layers, ReadResults
from tide_core.execution.graphs.launch_depth import MAX_STEPS, LaunchDepth, LaunchDepths
from tide_core.execution.graphs.masks import checks_tokens, needs_mask
from tide_core.exits.cost import SUFFIX_SIZES
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import MOST_ROWS
from tide_core.kv.cache import PagedKV
from tide_core.models.adapter import ModelAdapter

MAX_SUFFIX_TOKENS = 64
"""Of a deep pass with suffix drafts that is captured at start-up."""


class GraphCycles:
    """Cycle graphs by shape, each made when it is first needed. Graphs share memory: one runs at a time."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None = None,
        *,
        capture: bool | None = None,
        max_positions: int | None = None,
    ) -> None:
        """`exits` of one checkpoint; the last blocks of the pool are then reserved for branches. Without `capture` the
        same passes run op by op, as they do on a CPU. No row runs at `max_positions` or after; by default those of the
        model."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self._capture = cache.device.type == "cuda" if capture is None else capture
        self._graphs: dict[CycleShape, CycleGraph] = {}
        self._pool: Any = None
        self._branches = None if exits is None else Branches(cache, kernels)
        self._next_state = torch.zeros((3, MOST_ROWS), dtype=torch.int32, device=cache.device)
        self._layers = Layers(adapter.num_layers if exits is None else exits.checkpoints[0].layer, adapter.num_layers)
        self._max_positions = adapter.max_positions if max_positions is None else max_positions
        self._in_flight: InFlightStep | None = None
        self.depths = LaunchDepths()
        self._depth = LaunchDepth()
        """Of the rows that run now."""
        self._timing = StepTiming(0.0, 1)
        self._read_at: float | None = None

    @functools.cached_property
    def _slots(self) -> AdjustSlots:
        return AdjustSlots(self._adapter.vocab_size, self._cache.device)

    def shapes(self, max_rows: int, max_drafts: int, *, suffix_drafts: bool = False) -> list[CycleShape]:
        """The shapes of most steps, to be captured at start-up; others are captured when they first occur."""
        sizes = [size for size in TOKEN_SIZES if size <= size_for(min(max_rows, TOKEN_SIZES[-1]))]
        drafts = range(1 if self._exits is None else max_drafts + 1)
        pairs = [(size, count) for size in sizes for count in drafts if size * (count + 1) <= TOKEN_SIZES[-1]]
        both = (True, False)  # with branches and without: a row that ends drafts fewer tokens than others, and has none
        likeliest = dict.fromkeys(
            self._shape(size, count, MIN_BLOCKS, branch=branch, may_exit=may_exit)
            for size, count in pairs
            for branch in both
            for may_exit in both
        )
        suffix = (
            self._shape(size, count, MIN_BLOCKS, may_exit=self._exits is not None, has_suffix=True, by_exits=False)
            for size in sizes
            for count in SUFFIX_SIZES
            if size * (count + 1) <= MAX_SUFFIX_TOKENS
        )
        sampled = (
            self._shape(size, count, MIN_BLOCKS, may_exit=may_exit, samples=True)
            for size, count in pairs
            for may_exit in both
        )
        return [*likeliest, *dict.fromkeys(sampled), *(suffix if suffix_drafts else ())]

    @torch.inference_mode()
    def prepare(self, shape: CycleShape) -> None:
        """Capture a cycle before a request waits for it: it takes some hundredths of a second."""
        self._ready(shape)

    @staticmethod
    def supports(row: RowStep) -> bool:
        """Whether this row decodes, and the device can decide all that follows."""
        request = row.request
        return (
            len(row.token_ids) == 1
            and row.samples
            and not row.scores_prompt
            and row.num_drafts < FEW_QUERIES
            and not row.policy.skips_layers
            and (not request.adjusts_logits or adjust.supports(request))
            and (request.mask is None or not request.params.min_tokens)  # a grammar goes before fewest tokens
        )

    @staticmethod
    @functools.cache
    def max_rows(drafts: int) -> int:
        """Rows that one launch holds, with so many drafts of each."""
        return max(size for size in TOKEN_SIZES if size * (drafts + 1) <= TOKEN_SIZES[-1])

    def start(self, rows: Sequence[RowStep], *, lookahead: bool = False) -> Launched:
        """Launch a step of these rows, or take the one in flight that runs them; it must be read before the next but
        one is launched. With `lookahead` the next step is launched as well, if that can be: new rows then wait for it
        and have no result yet."""
        step, self._in_flight = self._in_flight, None
        found = {} if step is None else step.find(rows)
        drafts = [row.num_drafts for row in rows]
        lookahead = lookahead and not any([row.suffix_drafts for row in rows])  # the host finds them
        groups = _groups(drafts, [index for index in range(len(rows)) if index not in found])
        depth = self.depths.of(len(rows), any(drafts))
        if depth is not self._depth or not found:
            self._depth = depth
            depth.restart()
        if step is None or not found:
            self._read_at = None
            mine = groups.pop(0)
            step = self._launch([self._place(rows[index]) for index in mine])
            found = dict(zip(mine, range(len(mine)), strict=True))
            lookahead = lookahead and not groups
        step.finish(found, rows)
        if lookahead:
            step.next = self._in_flight = self._launch_ahead(rows, step, found)
            groups = groups if self._in_flight is None else []
        running = list(found), functools.partial(self._read, step, found, rows)
        return Launched(rows, groups, self._launch_group, running)

    def timing(self) -> StepTiming | None:
        """Of the last step that was read, where the next one was in flight: only then do host and device overlap."""
        return self._timing if self._overlaps else None

    def lookahead_steps(self) -> int:
        """As `ModelRunner` has it."""
        return (1 if self._in_flight is None else self._in_flight.num_cycles) + self._depth.steps - 1

    def discard_lookahead(self) -> None:
        self._in_flight = self._read_at = None
        self._depth.restart()

    @property
    def _overlaps(self) -> bool:
        return self._in_flight is not None and self._cache.device.type == "cuda"

    def _read(self, step: InFlightStep, found: dict[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        before = time.perf_counter()
        step.host.wait()
        now = time.perf_counter()
        wait_s = step.host.waited_s + now - before
        self._timing = StepTiming(wait_s, MAX_STEPS if step.branches == 1 and step.depth is not None else 1)
        if self._read_at is not None and step.depth is self._depth and (device_s := step.host.device_s()) is not None:
            self._depth.observe(step.num_cycles, device_s, wait_s, now - self._read_at)
        self._read_at = now if self._overlaps else None
        return step.results(found, rows)

    def _launch_group(self, rows: Sequence[RowStep]) -> ReadResults:
        step = self._launch([self._place(row) for row in rows])
        found = {index: index for index in range(len(rows))}
        step.finish(found, rows)
        return functools.partial(step.results, found, rows)

    def _place(self, row: RowStep) -> RowPlace:
        table, drafts = row.table, row.num_drafts
        return RowPlace(row, drafts, table.block_ids[: (table.length + drafts) // self._cache.block_size + 1])

    def _launch_ahead(self, rows: Sequence[RowStep], step: InFlightStep, found: dict[int, int]) -> InFlightStep | None:
        """Launch the step after another: with its rows, as it leaves them, and with rows that are new. None if a row
        has no blocks for it, or if all rows may end before."""
        size, max_positions = self._cache.block_size, self._max_positions
        continuing: list[tuple[int, int, int, RowStep]] = []
        is_needed, num_cycles, most_left = False, self._depth.steps, 0
        for index, row in enumerate(rows):
            table = row.table
            left = row.request.params.max_tokens - len(row.output_ids)
            number = found.get(index)
            previous, gained = -1, 0
            if number is not None:
                previous, gained = number * step.branches, step.num_cycles * (step.rows[number].drafts + 1)
            is_needed |= left > gained
            if number is not None:
                left -= step.num_cycles  # at least
                if left < 1:
                    continue
            most_left = left if left > most_left else most_left
            drafts = row.num_drafts if row.num_drafts < left else left - 1
            start, capacity = table.length + gained, len(table.block_ids) * size
            fits = (min(capacity, max_positions) - start) // (drafts + 1)
            if fits < num_cycles:
                num_cycles = fits
            continuing.append((drafts, previous, start, row))
        if not is_needed or num_cycles < 1 or not continuing:
            return None
        continuing.sort(key=_drafts_of, reverse=True)
        has_branches = self._branches is not None and branches_for(len(continuing), continuing[0][0], size) > 1
        has_one = has_branches or any([row.request.mask is not None for *_, row in continuing])
        num_cycles = 1 if has_one else min(num_cycles, most_left)  # each gives a token at least
        places = [
            RowPlace(row, drafts, row.table.block_ids[: (start + num_cycles * (drafts + 1) - 1) // size + 1], previous)
            for drafts, previous, start, row in continuing
        ]
        return self._launch(places, num_cycles) if len(places) <= self.max_rows(places[0].drafts) else None

    def _launch(self, rows: Sequence[RowPlace], num_cycles: int = 1) -> InFlightStep:
        """By falling number of drafts. With branches it has one cycle."""
        drafts, params = rows[0].drafts, [row.step.request.params for row in rows]
        # Branches try the likeliest tokens, but a sample must not depend on full depth. A row that drafts fewer tokens
        # than another has none either: they would all be the same.
        has_grammar = any([row.step.request.mask is not None for row in rows])
        masks = has_grammar and any([needs_mask(row.step) for row in rows])
        lists_for_grammar = has_grammar and any([checks_tokens(row.step) for row in rows])
        shape = self._shape(
            len(rows),
            drafts,
            blocks_for(max([len(row.blocks) for row in rows])),
            branch=drafts == rows[-1].drafts,
            may_exit=any([row.step.policy.may_exit for row in rows]),
            samples=not all([mine.temperature == 0.0 for mine in params]),
            adjusts=any([row.step.request.adjusts_logits for row in rows]),
            logprobs=lists_for_grammar or any([mine.logprobs is not None for mine in params]),
            masks=masks,
            has_suffix=any([row.suffix_drafts for row in rows]),
            by_exits=not all([row.suffix_drafts or not row.drafts for row in rows]),
        )
        num_cycles = num_cycles if shape.branches == 1 else 1
        graph = self._ready(shape)
        host, begins = graph.launch(rows, num_cycles)
        of_shape = shape.branches, host, begins, self._layers, shape.passes, graph if masks else None
        return InFlightStep(rows, *of_shape, num_cycles, None if has_grammar else self._depth)

    def _shape(
        self,
        num_rows: int,
        drafts: int,
        blocks: int,
        *,
        branch: bool = True,
        may_exit: bool,
        samples: bool = False,
        adjusts: bool = False,
        logprobs: bool = False,
        masks: bool = False,
        has_suffix: bool = False,
        by_exits: bool = True,
    ) -> CycleShape:
        branches = 1
        if self._branches is not None and branch and not samples and not adjusts and not masks and not has_suffix:
            branches = branches_for(num_rows, drafts, self._cache.block_size)
        writes = self._exits is not None and (may_exit or drafts > 0)
        if has_suffix and not by_exits:
            drafts = next(size for size in SUFFIX_SIZES if size >= drafts)
        kinds = samples, adjusts, logprobs, masks, has_suffix, by_exits or not has_suffix
        return CycleShape(size_for(num_rows * branches), drafts, blocks, branches, writes, *kinds)

    def _ready(self, shape: CycleShape) -> CycleGraph:
        """The cycle of this shape."""
        graph = self._graphs.get(shape)
        if graph is None:
            parts = self._adapter, self._cache, self._kernels, self._exits, self._branches
            slots = self._slots if shape.adjusts else None
            graph = self._graphs[shape] = CycleGraph(*parts, shape, self._next_state, slots)
        if self._capture and not graph.is_captured:
            graph.capture(self._pool)
            self._pool = graph.pool
        return graph


def _drafts_of(row: tuple[int, int, int, RowStep]) -> int:
    return row[0]


def _groups(drafts: Sequence[int], which: list[int]) -> list[list[int]]:
    """These rows by falling number of drafts, as many at a time as one launch holds."""
    if not which:
        return []
    which.sort(key=lambda index: -drafts[index])
    limit = GraphCycles.max_rows(drafts[which[0]])
    return [which[first : first + limit] for first in range(0, len(which), limit)]
