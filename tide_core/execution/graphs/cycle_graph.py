"""The passes of a cycle of one shape, one after another on the device: captured once, then launched as one graph, or
as three where the host follows grammars in between.

A cycle may be launched before the one before it is read, so the host's buffers exist twice. The device's exist once:
there cycles run one after another. A launch may hold several cycles of the same rows, each of which continues with the
next state of the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tide_core.batch import RowStep
from tide_core.execution.deep_pass import DeepStates, run_deep
from tide_core.execution.graphs.adjust import AdjustSlots
from tide_core.execution.graphs.base import Graph
from tide_core.execution.graphs.branches import Branches
from tide_core.execution.graphs.choice import Greedy, Sampled, TokenChooser
from tide_core.execution.graphs.cycle_output import CycleOutput, HostCopy, OutputBuffer
from tide_core.execution.graphs.cycle_shape import STREAMS, CycleInputs, CycleShape, RowPlace
from tide_core.execution.graphs.masks import MaskBuffer
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference.branches import Claims
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter
from tide_core.request import MAX_LOGPROBS


class HostBuffer:
    """Pinned memory of one launch: its inputs, and the outputs of each of its cycles."""

    def __init__(self, shape: CycleShape, output: OutputBuffer, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.inputs = torch.zeros(shape.size, dtype=torch.int32, pin_memory=on_gpu)
        self.rows = CycleInputs(shape, self.inputs.numpy())
        self._output, self._copies, self._num_cycles = output, [output.host_copy()], 0
        self._began, self._ended = (_timed_event() if on_gpu else None for _ in range(2))
        self._is_open = False
        self.waited_s = 0.0
        """That the host waited for the device before the whole launch was launched."""

    def output_of(self, cycle: int) -> HostCopy:
        while cycle >= len(self._copies):
            self._copies.append(self._output.host_copy())
        return self._copies[cycle]

    def mark_begin(self) -> None:
        """What is launched from now on belongs to this launch."""
        if self._began is not None:
            self._began.record()

    def mark_end(self, num_cycles: int) -> None:
        self._is_open, self._num_cycles = True, num_cycles
        if self._ended is not None:
            self._ended.record()

    def wait(self) -> None:
        """Until the launch is done; returns at once the second time."""
        if self._is_open and self._ended is not None:
            self._ended.synchronize()
        self._is_open = False

    def is_done(self) -> bool:
        """Whether the device has run all that was launched up to the end; False without a device clock."""
        return self._ended is not None and bool(self._ended.query())

    def device_s(self) -> float | None:
        """How long the device ran for a launch that was waited for; None without a device clock."""
        return None if self._began is None else float(self._began.elapsed_time(self._ended)) / 1e3

    def read(self) -> list[CycleOutput]:
        """The output of each cycle."""
        self.wait()
        return [copy.read() for copy in self._copies[: self._num_cycles]]


class _Draft(NamedTuple):
    """Of a draft pass: features [R, D] and logits [R, S]."""

    features: torch.Tensor
    logits: torch.Tensor


class CycleGraph(Graph):
    """The passes of one shape, from the row metadata to the cycle's output."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None,
        branches: Branches | None,
        shape: CycleShape,
        next_state: torch.Tensor,
        slots: AdjustSlots | None,
    ) -> None:
        """`next_state` [3, MOST_ROWS] passes from one cycle to the next, whatever their shapes. `slots`: where shapes
        that adjust logits find their rows' adjustments."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self.shape, self._branches, self._next_state = shape, branches if shape.branches > 1 else None, next_state
        device, branch_size = cache.device, cache.block_size if shape.branches > 1 else 0
        self._buffer = torch.zeros(shape.size, dtype=torch.int32, device=device)
        self._row_meta, self._tables = shape.split(self._buffer)
        wide, narrow = cycle_plan.sizes(shape.rows, shape.drafts, branch_size)
        self._wide = torch.empty(wide, dtype=torch.int64, device=device)
        self._narrow = torch.empty(narrow, dtype=torch.int32, device=device)
        self._parts = parts = cycle_plan.split(self._wide, self._narrow, shape.rows, shape.drafts, branch_size)
        of_drafts = parts.draft_positions, parts.draft_slots, parts.draft_starts, parts.draft_lens
        self._drafts = [self._view(*(part[d] for part in of_drafts), queries=1) for d in range(shape.passes)]
        self._suffix = shape.suffix_of(self._buffer) if shape.has_suffix else None
        self._deep = self._view(parts.positions, parts.slots, parts.starts, parts.lens, queries=shape.drafts + 1)
        num_logprobs = min(MAX_LOGPROBS, adapter.vocab_size) if shape.logprobs else 0
        self._output = OutputBuffer(shape.rows, shape.drafts, device, num_logprobs)
        self._host_buffers = [HostBuffer(shape, self._output, device) for _ in range(2)]
        every_row = torch.arange(shape.rows, device=device)
        self._stay = (-1 - every_row).int()
        """Instead of a position: each row continues at its own place."""
        self._draft_sources = every_row + shape.rows * torch.arange(shape.drafts, device=device)[:, None]
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._shortlist = none if exits is None else exits.shortlist
        self._slots = slots
        self._masks = MaskBuffer(shape, adapter.vocab_size, device) if shape.masks else None
        self._aside: list[object] = []
        """What the two side streams read in this cycle: its memory must not be used again before they are joined."""
        self._held: torch.Tensor | None = None
        """Logits of the deep pass, between the stages of a cycle with masks."""
        self._choice: TokenChooser = Greedy(kernels, shape.rows, shape.branches, device)
        if shape.samples:
            settings, self._keys = shape.sampling(self._buffer, torch.float64, torch.int64)
            numbers = len(STREAMS), shape.drafts + 1, shape.rows
            self._numbers = torch.zeros(numbers, dtype=torch.float64, device=device)
            self._choice = Sampled(kernels, exits, self._row_meta, parts, settings, self._numbers)
        # Scores have low priority: they yield to drafts and the deep pass. Exit state has high priority: its few CTAs
        # would wait for all of the LM head's otherwise.
        on_gpu = device.type == "cuda" and not shape.masks
        self._score_stream = _side_stream(device, 0) if on_gpu and shape.passes > 0 else None
        self._exit_stream = _side_stream(device, -2) if on_gpu and shape.writes_exit_state else None

    def _view(self, *indices: torch.Tensor, queries: int) -> KernelView:
        view = KernelView.of_tensors(self._cache, self._kernels, (*indices, self._tables))
        view.limit(queries, self.shape.blocks * self._cache.block_size)
        return view

    def capture(self, pool: Any) -> None:
        """It runs once before, without any rows, and leaves the next state as it is."""
        self._buffer.copy_(self._host_buffers[0].inputs)
        next_state = self._next_state.clone()
        super().capture(pool)
        self._next_state.copy_(next_state)

    def launch(self, rows: Sequence[RowPlace], num_cycles: int = 1) -> tuple[HostBuffer, list[int]]:
        """Launch cycles of these rows, one after another; with branches, whose tables change, only one. Returns the
        buffer to read them from, and where the tokens of each place begin in the deep passes. The launch before the
        last must have been read. With masks `choose` launches the rest of the cycle."""
        assert num_cycles == 1 or (self.shape.branches == 1 and self._masks is None)
        self._host_buffers.reverse()
        host = self._host_buffers[0]
        host.wait()
        slots = None if self._slots is None else self._slots.place(rows)
        begins = host.rows.fill(rows, slots)
        self._buffer.copy_(host.inputs, non_blocking=True)
        host.mark_begin()
        if self._masks is not None:
            self.replay(0)
            self._masks.fetch(self._output.drafted)
            self.replay(1)
            host.mark_end(0)
            return host, begins
        for cycle in range(num_cycles):
            if cycle:
                self._row_meta[cycle_plan.START].copy_(self._stay)
            self.replay()
            self._output.send(host.output_of(cycle))
        host.mark_end(num_cycles)
        return host, begins

    def choose(
        self, host: HostBuffer, places: Sequence[RowPlace], begins: Sequence[int], rows: Mapping[int, RowStep]
    ) -> set[int]:
        """The choice of a cycle with masks, before anything else is launched: those of `rows`, by place, as they are
        now that the cycle before is read. Other places may choose any token. Returns the places with all masks."""
        assert self._masks is not None
        masked = self._masks.send(places, begins, rows, host.is_done)  # while the deep pass runs
        host.waited_s = self._masks.waited_s
        self.replay(2)
        self._output.send(host.output_of(0))
        host.mark_end(1)
        return masked

    def _run(self) -> None:
        self._make_drafts()
        self._choose(self._run_deep())

    def _stages(self) -> Sequence[Callable[[], None]]:
        return (self._run,) if self._masks is None else (self._make_drafts, self._hold_logits, self._choose_held)

    def _hold_logits(self) -> None:
        self._held = self._run_deep()

    def _choose_held(self) -> None:
        logits, self._held = self._held, None  # graphs share memory, which is free again when nothing refers to it
        assert logits is not None
        self._choose(logits)

    def _make_drafts(self) -> None:
        """Plan, draft and score."""
        shape, parts, output, kernels = self.shape, self._parts, self._output, self._kernels
        first_spare = 0 if self._branches is None else self._branches.first_spare
        where = self._next_state, self._tables, self._cache.block_size, shape.drafts, self._wide, self._narrow
        kernels.plan_cycle(self._row_meta[: cycle_plan.NUM_PLANNED], *where, shape.branches, first_spare)
        if shape.samples:
            kernels.draw_numbers(self._keys, parts.starts, parts.positions, self._row_meta, self._numbers)
        if self._branches is not None:
            self._branches.copy(*parts.copies)
        drafts = [self._draft(distance, view) for distance, view in enumerate(self._drafts)]
        self._aside = [drafts]  # a run that failed may have left some
        if self._suffix is not None:
            torch.where(self._suffix < 0, self._suffix.long(), output.places, out=output.places)
            self._choice.take(self._suffix < 0)
        pending = parts.newest, output.places, self._shortlist, parts.sources
        kernels.pending_tokens(*pending, output.drafted, output.token_ids)
        with _stream(self._score_stream):
            if drafts and self._exits is not None:
                features = torch.cat([draft.features for draft in drafts])
                self._exits.score_features(features, output.all_top2, output.scores.flatten())

    def _run_deep(self) -> torch.Tensor:
        """Logits [T, V] of all that is pending, at full depth."""
        exits, token_ids = self._exits if self.shape.writes_exit_state else None, self._output.token_ids
        states = run_deep(self._adapter, self._deep, token_ids, exits, lambda: _stream(self._exit_stream))
        self._aside.append(states)
        with _stream(self._exit_stream):
            self._write_exit_state(states)
        return self._adapter.head(states.normed)

    def _choose(self, logits: torch.Tensor) -> None:
        """Choose tokens, accept drafts."""
        shape, parts, output, kernels = self.shape, self._parts, self._output, self._kernels
        adjusted = self._adjusted(logits, parts.sources, None)
        if self._masks is not None:
            adjusted = self._masks.apply(adjusted)
        if shape.samples:  # a draft whose score is too low is not verified
            _join(self._score_stream)
        self._choice.choose(adjusted, output)
        if not shape.samples:
            _join(self._score_stream)
        begins = parts.starts, parts.positions
        drafted = output.drafted, output.scores, output.following, adjusted, output.gaps
        after = self._next_state, output.next_state
        kernels.accept_drafts(self._row_meta, parts.counting, *begins, *drafted, shape.branches, *after)
        if shape.logprobs:  # under the model itself
            kernels.top_logprobs(logits, parts.sources, parts.starts, self._row_meta, output.following, *output.top)
        if self._slots is not None:
            counts = self._slots.state.counts
            kernels.count_outputs(self._row_meta, *begins, output.following, output.next_state, counts)
        _join(self._exit_stream)
        self._aside = []
        if self._branches is not None:  # the branch that was right becomes the row
            source, target, *_ = parts.returns
            self._branches.copy(source, target, Claims(parts.returns[2:], output.following, output.drafted[0]))

    def _write_exit_state(self, states: DeepStates) -> None:
        """Deep states and the head's K and V."""
        if self.shape.writes_exit_state:
            assert self._exits is not None
            parts = self._parts
            indices = parts.kept_slots, parts.deep_slots, parts.distances
            self._exits.write_exit_state(self._deep, *states[:3], *indices)

    def _draft(self, distance: int, view: KernelView) -> _Draft:
        """Draft the next tokens after those of the pass before; the first pass begins with the newest tokens."""
        adapter, exits, parts, output = self._adapter, self._exits, self._parts, self._output
        assert exits is not None
        [checkpoint] = exits.checkpoints
        inputs = adapter.layer_inputs(view.positions, view)
        if distance:
            states = exits.embed_drafts(output.places[distance - 1], view.positions)
        else:
            states = adapter.embed(parts.newest, view.positions)
        states = adapter.run_layers(states, 0, checkpoint.layer, inputs)[0]
        deep = parts.draft_deep_slots, parts.draft_distances[distance]
        draft = _Draft(*exits.draft(view, states, *deep))
        with _stream(self._score_stream):
            exits.top2(draft.logits, output.top2_of(distance))
        logits = self._adjusted(draft.logits, self._draft_sources[distance], self._shortlist)
        self._choice.draft(distance, logits, output)
        if self._slots is not None:  # the next passes count this token
            torch.index_select(self._shortlist, 0, output.places[distance], out=output.drafted[distance])
        return draft

    def _adjusted(self, logits: torch.Tensor, sources: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
        """Logits with the bias, masks and penalties of their rows; `sources`: distance and row of each."""
        if self._slots is None:
            return logits
        parts, out = self._parts, torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        of_rows = parts.starts, parts.positions, self._output.drafted, self._row_meta
        self._kernels.adjust_logits(logits, columns, sources, *of_rows, self._slots.state, out)
        return out


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _side_stream(device: torch.device, priority: int) -> Any:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _stream(other: Any) -> Iterator[None]:
    """On another stream than the current one, if there is one, for work that nothing waits for before `_join`. What it
    reads must live until then: the next owner of its memory would not wait for it."""
    if other is None:
        yield
        return
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        yield


def _join(other: Any) -> None:
    if other is not None:
        torch.cuda.current_stream().wait_stream(other)
