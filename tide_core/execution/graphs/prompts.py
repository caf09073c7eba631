"""Prompts on a GPU: chunks of several prompts through all layers as one graph launch.

A chunk of a prompt runs in a pass of up to 256 tokens: all layers, the exit state of every token, and the logits after
the last token of each row. It runs concurrently with the cycles of decoding rows, on a stream of its own: the kernels
of a small model leave most of a GPU idle, so that a new prompt costs the others little. They do not wait for it either:
it takes as long as several cycles, and its rows have no result until it is done. Both read the same weights and write
different slots; they share no workspace.

All its ops are those of the cycles: a token's result depends neither on how a prompt was cut into chunks nor on what
else ran in the step. What few rows ask for, a draw, logit adjustments or log-probabilities, is launched after the graph
(`_PromptPass.choose`). Longer chunks and contexts take the plain path, which reads K and V only once for all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch

from tide_core.batch import RowResult, RowStep
from tide_core.execution.deep_pass import ExitIndices, run_deep
from tide_core.execution.graphs.base import Graph
from tide_core.execution.graphs.cycle_output import OutputBuffer
from tide_core.execution.graphs.in_flight import NO_SCORE, Launched, ReadResults, is_unchanged
from tide_core.exits.propose import Exits
from tide_core.exits.row_cycle import RowCycle
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference.cycle import LOGPROBS, NUM_META
from tide_core.kernels.reference.draw import BEST, NUM_HEAD
from tide_core.kv.cache import PagedKV, RowSpan, StepIndex
from tide_core.kv.kernel_view import Column, IndexLayout, KernelView
from tide_core.models.adapter import ModelAdapter
from tide_core.request import MAX_LOGPROBS
from tide_core.sampling.adjust import adjusted
from tide_core.sampling.draw import uniform

PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of a pass."""
MAX_PROMPTS = 16
"""Rows of a pass."""
MAX_CONTEXT = 1024
FEW_TOKENS, SHORT_CONTEXT = 64, 512
"""Passes of so few tokens exist for short contexts of few rows as well. Attention is launched for the largest number of
pieces; with a narrow model these are then no more than a large GPU has multiprocessors, which halves its time."""
TOKENS_PER_ROW = 8
"""Of such a pass, in the mean of all rows that it holds."""
PATIENCE = 16
"""Steps that do not wait for a prompt; the next one does."""
PADDING = Column(np.zeros(0, dtype=np.int64), 0)


class PromptShape(NamedTuple):
    tokens: int
    writes_exit_state: bool
    is_short: bool
    """For short contexts of few rows."""

    @property
    def rows(self) -> int:
        return self.tokens // TOKENS_PER_ROW if self.is_short else MAX_PROMPTS

    @property
    def positions(self) -> int:
        """Of a row."""
        return SHORT_CONTEXT if self.is_short else MAX_CONTEXT

    @classmethod
    def holding(cls, tokens: int, rows: int, max_context: int, *, writes_exit_state: bool) -> PromptShape:
        """The smallest that holds so many."""
        size = next(size for size in PROMPT_SIZES if size >= tokens)
        short = cls(size, writes_exit_state, is_short=True)
        if size <= FEW_TOKENS and rows <= short.rows and max_context <= short.positions:
            return short
        return cls(size, writes_exit_state, is_short=False)


class GraphPrompts:
    """Prompt passes by shape, each made when it is first needed. Graphs share memory: one runs at a time."""

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
        self._capture = on_gpu if capture is None else capture
        self._passes: dict[PromptShape, _PromptPass] = {}
        self._pool: Any = None
        self._workspaces: list[torch.Tensor] = []
        self._stream: Any = torch.cuda.Stream(cache.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._earlier: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._launch: _PromptLaunch | None = None
        self._num_polls = 0

    def shapes(self) -> list[PromptShape]:
        """All that there are."""
        return [
            PromptShape(size, writes_exit_state, is_short)
            for size in PROMPT_SIZES
            for writes_exit_state in ((False,) if self._exits is None else (False, True))
            for is_short in ((True, False) if size <= FEW_TOKENS else (False,))
        ]

    @torch.inference_mode()
    def prepare(self, shape: PromptShape) -> None:
        """Capture a pass before a request waits for it."""
        no_exit_state = [PADDING, PADDING._replace(padding=-1), PADDING, PADDING]
        columns = no_exit_state if shape.writes_exit_state else [PADDING]
        self._ready(shape, StepIndex.build([], self._cache.block_size), columns)

    @staticmethod
    def supports(row: RowStep) -> bool:
        """Whether this is a chunk of a prompt, short enough, and nothing but the next token is asked of it."""
        num = len(row.token_ids)
        fits = 1 < num <= PROMPT_SIZES[-1] and row.start + num <= MAX_CONTEXT
        return fits and not row.num_drafts and not row.scores_prompt

    def order_after(self, rows: Sequence[RowStep]) -> None:
        """The next prompts run after what is on the current stream by now. What follows there may run concurrently with
        them, except with prompts in flight that are not among these rows any more: others may own their blocks now."""
        if self._stream is None:
            return
        launch = self._launch
        found = 0 if launch is None else len(launch.find(rows))
        if launch is not None and found < len(launch.rows):
            torch.cuda.current_stream().wait_stream(self._stream)
        if found < len(rows):
            self._earlier.record()

    @property
    def in_flight(self) -> bool:
        """Whether any were launched and not read."""
        return self._launch is not None

    def start(self, rows: Sequence[RowStep], *, waits: bool = True) -> Launched:
        """Launch these rows, except those in flight. Without `waits`, rows that are not done have no result yet and
        come again in the next step."""
        launch = self._launch
        found = {} if launch is None else launch.find(rows)
        groups = _groups(rows, [index for index in range(len(rows)) if index not in found])
        if launch is None or not found:
            if not groups:
                self._launch = None
                return Launched(rows, [], self._run)
            mine = groups.pop(0)
            launch = _PromptLaunch.of([rows[index] for index in mine], self._run)
            self._num_polls = 0
            found = dict(zip(mine, range(len(mine)), strict=True))
        self._launch = launch
        running = list(found), functools.partial(self._read, list(found.values()))
        return Launched(rows, groups if waits else [], self._run, running, None if waits else self._is_done)

    def discard_lookahead(self) -> None:
        if self._launch is not None and self._stream is not None:
            self._stream.synchronize()
        self._launch = None

    def _is_done(self) -> bool:
        self._num_polls += 1
        return self._num_polls > PATIENCE or self._stream is None or bool(self._stream.query())

    def _read(self, numbers: Sequence[int]) -> list[RowResult]:
        launch, self._launch = self._launch, None
        assert launch is not None
        results = launch.read()
        return [results[number] for number in numbers]

    def _run(self, rows: Sequence[RowStep]) -> ReadResults:
        spans = [RowSpan(row.table.block_ids, row.start, len(row.token_ids)) for row in rows]
        index = StepIndex.build(spans, self._cache.block_size)
        flat = np.asarray([token for row in rows for token in row.token_ids], dtype=np.int64)
        writes = self._exits is not None and any(row.policy.may_exit for row in rows)
        columns = [Column(flat, 0), *(self._exit_columns(rows, index) if writes else ())]
        max_context = int(index.context_lens.max())
        shape = PromptShape.holding(len(flat), len(rows), max_context, writes_exit_state=writes)
        with self._on_own_stream():
            one = self._ready(shape, index, columns)
            one.replay()
            one.choose(rows)
        return lambda: self._results(rows, one)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """After what earlier steps left on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._earlier)
        with torch.cuda.stream(self._stream):
            yield

    def _ready(self, shape: PromptShape, index: StepIndex, columns: Sequence[Column]) -> _PromptPass:
        """The pass of this shape with these inputs, to be replayed."""
        one = self._passes.get(shape)
        if one is None:
            exits = self._exits if shape.writes_exit_state else None
            parts = self._adapter, self._cache, self._kernels
            one = self._passes[shape] = _PromptPass(*parts, shape, exits, self._workspaces)
        one.load(index, columns)
        if self._capture and not one.is_captured:
            one.capture(self._pool)
            self._pool = one.pool
        return one

    def _exit_columns(self, rows: Sequence[RowStep], index: StepIndex) -> list[Column]:
        """As `ExitIndices` has it: each token follows one that ran deep, except the first of a row."""
        size, slots = self._cache.block_size, index.slots
        tracked, before = slots.copy(), np.empty_like(slots)
        before[1:] = slots[:-1]
        for row, begin in zip(rows, index.query_starts.tolist(), strict=False):
            last = max(row.start - 1, 0)
            before[begin] = row.table.block_ids[last // size] * size + last % size
            if not row.policy.may_exit:
                tracked[begin : begin + len(row.token_ids)] = -1
        return [Column(tracked, -1), Column(before, 0), Column(np.minimum(index.positions, 1), 0)]

    def _results(self, rows: Sequence[RowStep], one: _PromptPass) -> list[RowResult]:
        """What follows the rows whose prompt is complete."""
        if self._stream is not None:
            self._stream.synchronize()
        output, num_layers = one.host.read(), self._adapter.num_layers
        assert output.top is not None
        results = []
        for index, row in enumerate(rows):
            ran, best, num_logprobs = len(row.token_ids), output.best[index], row.request.params.logprobs
            result = RowResult(num_valid=ran, layers_run=ran * num_layers)
            if row.samples and not isfinite(best):
                result = result._replace(error=f"numerical_error: the largest logit of the row is {best}")
            elif row.samples:
                token = (output.following[index],)
                result = result._replace(token_ids=token, exit_layers=(num_layers,), scores=NO_SCORE)
                if num_logprobs is not None:
                    result = result._replace(notes=tuple(output.top.notes(index, index + 1, num_logprobs)))
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class _PromptLaunch:
    """Prompts in flight."""

    rows: Sequence[RowStep]
    starts: Sequence[int]
    blocks: Sequence[list[int]]
    read: ReadResults

    @classmethod
    def of(cls, rows: Sequence[RowStep], run: Callable[[Sequence[RowStep]], ReadResults]) -> _PromptLaunch:
        return cls(rows, [row.start for row in rows], [list(row.table.block_ids) for row in rows], run(rows))

    def find(self, rows: Sequence[RowStep]) -> dict[int, int]:
        """Index of each row in the launch, for rows that have not changed. How many tokens a step asks for now does not
        matter: a row gains those it was launched with."""
        numbers = {id(row.table): number for number, row in enumerate(self.rows)}
        found: dict[int, int] = {}
        for index, row in enumerate(rows):
            number = numbers.get(id(row.table))
            if number is None or self.starts[number] != row.start:
                continue
            if is_unchanged(self.rows[number], self.blocks[number], row):
                found[index] = number
        return found


def _groups(rows: Sequence[RowStep], which: Sequence[int]) -> list[list[int]]:
    """These rows, as many at a time as fit a pass."""
    groups: list[list[int]] = []
    tokens_left = rows_left = 0
    for index in which:
        num = len(rows[index].token_ids)
        if num > tokens_left or not rows_left:
            groups.append([])
            tokens_left, rows_left = PROMPT_SIZES[-1], MAX_PROMPTS
        groups[-1].append(index)
        tokens_left, rows_left = tokens_left - num, rows_left - 1
    return groups


class _PromptPass(Graph, KernelView):
    """The pass of one shape, from the host's indices to the host's results; the view that its own layers use."""

    _may_gather = False
    _logits: torch.Tensor
    """After the last token of each row, [R, V]; of padding, anything."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        shape: PromptShape,
        exits: Exits | None,
        workspaces: list[torch.Tensor],
    ) -> None:
        """`workspaces`: those of attention, for all prompt passes."""
        num_columns = 1 + (len(ExitIndices._fields) if exits is not None else 0)
        blocks = -(-shape.positions // cache.block_size)
        self._layout = layout = IndexLayout(shape.tokens, shape.rows, blocks, num_columns)
        on_gpu = cache.device.type == "cuda"
        self._host = torch.zeros(layout.size, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(layout.size, dtype=torch.int32, device=cache.device)
        self._sent: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        *self._columns, positions, slots, starts, lens, tables = layout.split(self._device)
        self._take(cache, kernels, StepIndex.build([], cache.block_size), (positions, slots, starts, lens, tables))
        self._workspaces = workspaces
        self.limit(shape.tokens, blocks * cache.block_size)
        self._adapter, self._exits = adapter, exits
        self._output = OutputBuffer(shape.rows, 0, cache.device, min(MAX_LOGPROBS, adapter.vocab_size))
        self.host = self._output.host_copy()
        """The output on the host: one token after each row."""
        self._sources = torch.arange(shape.rows, device=cache.device)
        self._begins = torch.arange(shape.rows + 1, dtype=torch.int32, device=cache.device)
        self._scratch: Any = None

    def load(self, index: StepIndex, columns: Sequence[Column]) -> None:
        """Copy a step's indices to the device."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()
        self._index = index
        self._layout.fill(self._host.numpy(), index, columns)
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _run(self) -> None:
        token_ids, *indices = self._columns
        states = run_deep(self._adapter, self, token_ids, self._exits)
        if self._exits is not None:
            self._exits.write_exit_state(self, *states[:3], *ExitIndices(*indices))
        last = (self._starts[1:].long() - 1).clamp_(min=0)
        self._logits = self._adapter.head(states.normed.index_select(0, last))
        if self._scratch is None:  # the first run is not captured
            device, (num, vocabulary) = self._logits.device, self._logits.shape
            self._scratch = self._kernels.score_scratch(device, num, vocabulary=vocabulary)
        self._kernels.top2_logsumexp(self._logits, self._scratch, out=self._output.deep_top2)
        self._output.send(self.host)

    def choose(self, rows: Sequence[RowStep]) -> None:
        """Launch what rows need whose prompt is complete and whose next token is not just the largest logit. Nothing
        here waits for the device."""
        ending = [row.request for row in rows if row.samples]
        draws = any(
            not request.params.is_greedy or request.adjusts_logits or request.mask is not None for request in ending
        )
        lists = any(request.params.logprobs is not None for request in ending)
        if draws:
            self._draw(rows)
        if lists:
            self._list_logprobs(rows)
        if draws or lists:
            self._output.send(self.host)

    def _draw(self, rows: Sequence[RowStep]) -> None:
        """The tokens of all rows, after their logit adjustments; a greedy row gets its largest logit."""
        num, output, logits = len(rows), self._output, self._logits[: len(rows)]
        params = [row.request.params for row in rows]
        sampling = [RowCycle.begin(row, 1).sampling_row(0) for row in rows]
        settings = [(mine.temperature, mine.top_k, mine.top_p, mine.min_p, -inf) for mine in params]
        numbers = [uniform(row.seed, len(row.output_ids)) for row in sampling]
        given = torch.tensor([*zip(*settings, strict=True), numbers], dtype=torch.float64)
        given = given.to(logits.device, non_blocking=True)
        heads = torch.empty((num, NUM_HEAD), dtype=torch.float64, device=logits.device)
        drawn = adjusted(logits.float(), sampling), given[:-1], given[-1], logits.shape[1]
        self._kernels.draw(*drawn, out=(output.following[:num], heads))
        output.best[:num] = heads[:, BEST]

    def _list_logprobs(self, rows: Sequence[RowStep]) -> None:
        num, output, logits = len(rows), self._output, self._logits[: len(rows)]
        wanted = [row.request.params.logprobs for row in rows]
        row_meta = torch.full((NUM_META, num), -1, dtype=torch.int32)
        row_meta[LOGPROBS] = torch.tensor([-1 if listed is None else listed for listed in wanted])
        where = self._sources[:num], self._begins[: num + 1], row_meta.to(logits.device, non_blocking=True)
        self._kernels.top_logprobs(logits, *where, output.following[:num], *(part[:num] for part in output.top))
