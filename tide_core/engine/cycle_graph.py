"""The passes of a cycle of one shape, one behind another on the device: captured once, then launched as one.

What exits remember of the tokens is no result: it is a second launch, which runs while the host reads the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tide_core.engine.branches import Branches
from tide_core.engine.captured_pass import Buffer, Replayed
from tide_core.engine.cycle_choice import CycleChoice, Drawn, Likeliest
from tide_core.engine.cycle_room import CycleRoom, CycleRows
from tide_core.engine.cycle_said import CycleSaid, Said
from tide_core.engine.deep_pass import DeepStates, run_deep
from tide_core.engine.exits import Exits
from tide_core.kernels import CudaKernels, cycle_plan
from tide_core.kernels.branching import Claims
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter


class Remembering(Replayed):
    """What is kept for later cycles, once all tokens have run."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._work = run

    def _run(self) -> None:
        self._work()


class CycleGraph(Replayed):
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
        self._about, self._tables, self._ranks, self._copies, self._returns = room.split(self._buffer.device)
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
        on_gpu = cache.device.type == "cuda"
        apart = on_gpu and exits is not None
        self._side: Any = torch.cuda.Stream(cache.device) if apart else None  # type: ignore[no-untyped-call]
        self._sent: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._is_open = False
        self._states: DeepStates | None = None
        self._remembering = None if exits is None else Remembering(self._remember)

    def _view(self, *indices: torch.Tensor, queries: int) -> KernelView:
        view = KernelView.of_tensors(self._cache, self._kernels, (*indices, self._tables))
        view.limit(queries, self.room.blocks * self._cache.block_size)
        return view

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def wait(self) -> None:
        """Until the host may write: at once, unless what was launched last was never read."""
        if self._is_open and self._sent is not None:
            self._sent.synchronize()
        self._is_open = False

    def capture(self, pool: Any) -> None:
        super().capture(pool)  # it runs once beforehand
        if self._remembering is not None:
            self._remembering.capture(self.pool)
        self._states = None  # other graphs may have the memory
        self._note_sent()

    def replay(self, *, remembers: bool = True) -> None:
        """`remembers`: whether any of the rows may exit."""
        super().replay()
        self._note_sent()
        if remembers and self._remembering is not None:
            self._remembering.replay()

    def _note_sent(self) -> None:
        self._is_open = True
        if self._sent is not None:
            self._sent.record()

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
        beside = None if self.room.draws else self._side  # drafts that were drawn are judged by their scores
        if features and self._exits is not None:
            with _stream(beside):
                self._exits.rate(torch.cat(features), said.all_peaks, said.scores.flatten())
        self._states = run_deep(self._adapter, self._deep, said.token_ids, self._exits)
        self._choice.settle(self._adapter.head(self._states.normed), said)
        if features and beside is not None:
            torch.cuda.current_stream().wait_stream(beside)
        said.send()

    def _remember(self) -> None:
        """Deep states and the head's K and V; and the branch that was right becomes the row."""
        assert self._exits is not None
        assert self._states is not None
        parts, said = self._parts, self._said
        self._exits.keep(self._deep, *self._states, parts.kept_slots, parts.deep_slots, parts.distances)
        if self.room.branches > 1:
            assert self._branches is not None
            source, target, *_ = self._returns
            self._branches.copy(source, target, Claims(self._returns[2:], said.following, said.drafted[0]))

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


@contextlib.contextmanager
def _stream(other: Any) -> Iterator[None]:
    """On another stream than the current one, if there is one: for what nobody waits for before the results are sent.
    What it reads must live till then: whoever held its memory next would not wait for it."""
    if other is None:
        yield
        return
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        yield
