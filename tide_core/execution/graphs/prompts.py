"""Prompts on a GPU: pieces of several of them through all layers as one launch.

A piece of a prompt is run as a captured pass of up to 256 tokens: all layers, what the exits keep of every token, and
the logits behind the last token of each row. It runs beside the cycles of the rows that talk, on a stream of its own:
the kernels of a small model leave most of a GPU idle, so that a prompt that comes in costs the others little. Nor do
they wait for it: it takes as long as several cycles, and its rows get nothing until it is done. Both read the same
weights and write different slots; what they work in is not shared.

All its ops are those of the cycles: what a token comes to does not depend on how a prompt was cut into pieces, nor on
what else was in the step. Longer pieces and contexts are left to the plain path, which reads K and V only once for all
of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tide_core.batch import RowResult, RowStep
from tide_core.execution.deep_pass import Kept, run_deep
from tide_core.execution.graphs.base import CapturedPass, Passes, Step
from tide_core.execution.graphs.cycle import Reading, Started
from tide_core.execution.graphs.in_flight import find_rows
from tide_core.exits.accept import Settler
from tide_core.exits.policy import changes_the_choice
from tide_core.exits.propose import Exits
from tide_core.exits.row_cycle import RowCycle
from tide_core.exits.verify import Verifier
from tide_core.kernels import CudaKernels
from tide_core.kv.cache import PagedKV, RowSpan, StepIndex
from tide_core.kv.kernel_view import Room
from tide_core.models.adapter import ModelAdapter

PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of a pass."""
MOST_PROMPTS = 16
"""Rows of a pass."""
LONGEST_CONTEXT = 1024
FEW_TOKENS, SHORT_CONTEXT = 64, 512
"""A pass of so few tokens is made for short contexts of few rows as well. Attention is launched for the most pieces
there may be; with a narrow model these are then no more than a large GPU has multiprocessors, which takes it half the
time."""
TOKENS_OF_ROW = 8
"""In such a pass, at least, in the mean of all rows that there is room for."""
PATIENCE = 16
"""Steps that go by without a prompt; then they wait for it."""


class Shape(NamedTuple):
    tokens: int
    keeps: bool
    """Whether the exits keep something of them."""
    is_short: bool
    """For short contexts of few rows."""

    @property
    def rows(self) -> int:
        return self.tokens // TOKENS_OF_ROW if self.is_short else MOST_PROMPTS

    @property
    def positions(self) -> int:
        """Of a row."""
        return SHORT_CONTEXT if self.is_short else LONGEST_CONTEXT

    @classmethod
    def holding(cls, tokens: int, rows: int, longest: int, *, keeps: bool) -> Shape:
        """The smallest that has room for so many."""
        size = next(size for size in PROMPT_SIZES if size >= tokens)
        short = cls(size, keeps, is_short=True)
        if size <= FEW_TOKENS and rows <= short.rows and longest <= short.positions:
            return short
        return cls(size, keeps, is_short=False)


class CapturedPrompts:
    """Passes by their shape, each made when it is first wanted. Graphs share memory: one runs at a time."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None = None,
        *,
        capture: bool | None = None,
    ) -> None:
        """`exits` of one checkpoint. Without `capture` the same passes run op by op, as they do on a CPU."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        on_gpu = cache.device.type == "cuda"
        self._passes: Passes[_PromptPass] = Passes(capture=on_gpu if capture is None else capture)
        self._verifier, self._settler = (
            Verifier((), adapter.num_layers),
            Settler(adapter.num_layers, adapter.num_layers),
        )
        self._workspaces: list[torch.Tensor] = []
        self._stream: Any = torch.cuda.Stream(cache.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._before: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._flight: _PromptFlight | None = None
        self._num_asked = 0

    def shapes(self) -> list[Shape]:
        """All that there are."""
        return [
            Shape(size, keeps, is_short)
            for size in PROMPT_SIZES
            for keeps in ((False,) if self._exits is None else (False, True))
            for is_short in ((True, False) if size <= FEW_TOKENS else (False,))
        ]

    @torch.inference_mode()
    def prepare(self, shape: Shape) -> None:
        """Make a pass before anybody waits for it."""
        self._ready(shape, (StepIndex.build([], self._cache.block_size), ()))

    @staticmethod
    def takes(row: RowStep) -> bool:
        """Whether this is a piece of a prompt, and short enough."""
        num = len(row.token_ids)
        return 1 < num <= PROMPT_SIZES[-1] and row.start + num <= LONGEST_CONTEXT and not row.num_drafts

    def mark(self, rows: Sequence[RowStep]) -> None:
        """What is on the current stream by now comes before the next prompts; what follows may run beside them, but for
        those that are on their way and not among these rows any more: others may have their blocks now."""
        if self._stream is None:
            return
        flight = self._flight
        found = 0 if flight is None else len(flight.find(rows))
        if flight is not None and found < len(flight.rows):
            torch.cuda.current_stream().wait_stream(self._stream)
        if found < len(rows):
            self._before.record()

    @property
    def are_on_their_way(self) -> bool:
        """Whether any were begun and not read."""
        return self._flight is not None

    def start(self, rows: Sequence[RowStep], *, waits: bool = True) -> Started:
        """Begin to run these, as far as they are not on their way. Whoever does not want to wait for them gets nothing
        of those that are not done, and comes back with them."""
        flight = self._flight
        found = {} if flight is None else flight.find(rows)
        groups = _groups(rows, [r for r in range(len(rows)) if r not in found])
        if flight is None or not found:
            if not groups:
                self._flight = None
                return Started(rows, [], self._launch)
            mine = groups.pop(0)
            flight = _PromptFlight.of([rows[r] for r in mine], self._launch)
            self._num_asked = 0
            found = dict(zip(mine, range(len(mine)), strict=True))
        self._flight = flight
        running = list(found), functools.partial(self._read, list(found.values()))
        return Started(rows, groups if waits else [], self._launch, running, self._is_done if not waits else None)

    def forget(self) -> None:
        """Nothing of what was begun is of use any more."""
        if self._flight is not None and self._stream is not None:
            self._stream.synchronize()
        self._flight = None

    def _is_done(self) -> bool:
        self._num_asked += 1
        return self._num_asked > PATIENCE or self._stream is None or bool(self._stream.query())

    def _read(self, which: Sequence[int]) -> list[RowResult]:
        flight, self._flight = self._flight, None
        assert flight is not None
        results = flight.reading()
        return [results[number] for number in which]

    def _launch(self, rows: Sequence[RowStep]) -> Reading:
        spans = [RowSpan(row.table.block_ids, row.start, len(row.token_ids)) for row in rows]
        index = StepIndex.build(spans, self._cache.block_size)
        flat = np.asarray([token for row in rows for token in row.token_ids], dtype=np.int64)
        keeps = self._exits is not None and any(row.policy.may_exit for row in rows)
        others = [(flat, 0), *(self._kept(rows, index) if keeps else ())]
        shape = Shape.holding(len(flat), len(rows), int(index.context_lens.max()), keeps=keeps)
        with self._beside():
            one = self._ready(shape, (index, others))
            one.replay()
        return lambda: self._results(rows, one)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of the prompts, behind what earlier steps have left on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._before)
        with torch.cuda.stream(self._stream):
            yield

    def _ready(self, shape: Shape, step: Step) -> _PromptPass:
        keeps, blocks = shape.keeps, -(-shape.positions // self._cache.block_size)
        room = Room(shape.tokens, shape.rows, blocks, 1 + len(Kept._fields) * keeps)
        index, others = step
        nothing = np.zeros(0, dtype=np.int64)
        others = others or [(nothing, 0), *((nothing, rest) for rest in (-1, 0, 0) if keeps)]
        exits = self._exits if keeps else None
        return self._passes.ready(
            shape,
            lambda: _PromptPass(self._adapter, self._cache, self._kernels, room, exits, self._workspaces),
            [(index, others)],
        )

    def _kept(self, rows: Sequence[RowStep], index: StepIndex) -> list[tuple[Any, int]]:
        """As `Kept` has it: each token follows one that ran deep, but for the first of all."""
        size, slots = self._cache.block_size, index.slots
        tracked, before = slots.copy(), np.empty_like(slots)
        before[1:] = slots[:-1]
        for row, begin in zip(rows, index.query_starts.tolist(), strict=False):
            last = max(row.start - 1, 0)
            before[begin] = row.table.block_ids[last // size] * size + last % size
            if not row.policy.may_exit:
                tracked[begin : begin + len(row.token_ids)] = -1
        return [(tracked, -1), (before, 0), (np.minimum(index.positions, 1), 0)]

    def _results(self, rows: Sequence[RowStep], one: _PromptPass) -> list[RowResult]:
        """What follows the rows that are whole now."""
        if self._stream is not None:
            self._stream.synchronize()
        if all(_takes_the_likeliest(row) for row in rows):
            best, best_ids = one.best_here.tolist()
            return [self._settler.prompt(row, best[r], int(best_ids[r])) for r, row in enumerate(rows)]
        cycles = [RowCycle.begin(row, 1) for row in rows]
        for cycle in cycles:
            cycle.layers_run = len(cycle.tokens) * self._adapter.num_layers
        ends = [r for r, row in enumerate(rows) if row.samples]
        wanted = [[len(row.token_ids) - 1] if row.samples else [] for row in rows]
        logits = one.logits[: len(rows)] if len(ends) == len(rows) else one.logits[ends]
        return self._verifier.settle(cycles, wanted, logits, one.best[:, ends])


@dataclass(frozen=True, slots=True)
class _PromptFlight:
    """Prompts on their way."""

    rows: Sequence[RowStep]
    starts: Sequence[int]
    blocks: Sequence[list[int]]
    reading: Reading

    @classmethod
    def of(cls, rows: Sequence[RowStep], launch: Callable[[Sequence[RowStep]], Reading]) -> _PromptFlight:
        return cls(rows, [row.start for row in rows], [list(row.table.block_ids) for row in rows], launch(rows))

    def find(self, rows: Sequence[RowStep]) -> dict[int, int]:
        """Which of these rows are on their way, and as the how manyth of them: those that are as they were. How much of
        a prompt is asked for now does not matter: it gains what it was begun with."""
        found = find_rows(self.rows, self.blocks, rows)
        return {index: number for index, number in found.items() if self.starts[number] == rows[index].start}


def _takes_the_likeliest(row: RowStep) -> bool:
    """Whether what follows the row is the largest of its logits, and nothing else about them is asked."""
    params = row.request.params
    return params.logprobs is None and not changes_the_choice(params)


def _groups(rows: Sequence[RowStep], which: Sequence[int]) -> list[list[int]]:
    """These of the rows, as many at a time as fit a pass."""
    groups: list[list[int]] = []
    left, places = 0, 0
    for r in which:
        num = len(rows[r].token_ids)
        if num > left or not places:
            groups.append([])
            left, places = PROMPT_SIZES[-1], MOST_PROMPTS
        groups[-1].append(r)
        left, places = left - num, places - 1
    return groups


class _PromptPass(CapturedPass):
    """The pass of one shape, from the host's buffer to the host's results."""

    logits: torch.Tensor
    """Behind the last token of each row, [R, V]; of a row that is not there, anything."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        room: Room,
        exits: Exits | None,
        workspaces: list[torch.Tensor],
    ) -> None:
        """`workspaces`: those of attention, for all passes of prompts."""
        super().__init__(cache, kernels, room)
        self._workspaces = workspaces
        self.limit(room.tokens, room.blocks * cache.block_size)
        self._adapter, self._exits = adapter, exits
        self.best = torch.empty(2, room.rows, dtype=torch.float64, pin_memory=cache.device.type == "cuda")
        """On the host: the largest of the logits and where they stand."""
        self.best_here = self.best.numpy()
        self._scratch: Any = None

    def _run(self) -> None:
        token_ids, *kept = self.others
        states = run_deep(self._adapter, self, token_ids, self._exits if kept else None)
        if self._exits is not None and kept:
            self._exits.keep(self, *states[:3], *Kept(*kept))
        last = (self._starts[1:].long() - 1).clamp_(min=0)
        self.logits = self._adapter.head(states.normed.index_select(0, last))
        if self._scratch is None:  # the first run is not captured
            device, (num, vocabulary) = self.logits.device, self.logits.shape
            self._scratch = self._kernels.judge_scratch(device, num, vocabulary=vocabulary)
        peaks = self._kernels.peak(self.logits, self._scratch)
        self.best.copy_(torch.stack((peaks.best.double(), peaks.best_at.double())), non_blocking=True)
