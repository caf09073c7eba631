"""The passes of a cycle of one shape, one behind another on the device: captured once, then launched as one.

A cycle may be launched while the one before it has not been read, so there are two of everything on the host's side:
what it says of the rows, and what comes of them. On the device there is one: there cycles run one behind another. A
launch may have several legs: the same rows, each time as the leg before leaves them, and what comes of each leg.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tide_core.execution.deep_pass import DeepStates, run_deep
from tide_core.execution.graphs.base import Replayed
from tide_core.execution.graphs.branches import Branches
from tide_core.execution.graphs.choice import CycleChoice, Drawn, Likeliest
from tide_core.execution.graphs.cycle_output import CycleSaid, Landing, Said
from tide_core.execution.graphs.cycle_shape import CycleRoom, CycleRows, RowPlace
from tide_core.exits.propose import Exits
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference.branches import Claims
from tide_core.kv.cache import PagedKV
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter


class Side:
    """The host's side of one launch, with all its legs."""

    def __init__(self, room: CycleRoom, said: CycleSaid, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(room.size, dtype=torch.int32, pin_memory=on_gpu)
        self.rows = CycleRows(room, self.host.numpy())
        self._said, self._landings, self._legs = said, [said.landing()], 0
        self._begun, self._sent = (_timed_event() if on_gpu else None for _ in range(2))
        self._is_open = False

    def landing(self, leg: int) -> Landing:
        """Where what a leg says arrives."""
        while leg >= len(self._landings):
            self._landings.append(self._said.landing())
        return self._landings[leg]

    def note_begun(self) -> None:
        """What is launched from now on is of this launch."""
        if self._begun is not None:
            self._begun.record()

    def note_sent(self, legs: int = 1) -> None:
        self._is_open, self._legs = True, legs
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until all of the launch is done: at once, if it was waited for before."""
        if self._is_open and self._sent is not None:
            self._sent.synchronize()
        self._is_open = False

    def ran_s(self) -> float | None:
        """How long the device was busy with a launch that was waited for; None without one."""
        return None if self._begun is None else float(self._begun.elapsed_time(self._sent)) / 1e3

    def read(self) -> list[Said]:
        """What each leg says."""
        self.wait()
        return [landing.read() for landing in self._landings[: self._legs]]


class _Made(NamedTuple):
    """By a draft pass: what scores follow from, [R, D], and logits [R, S]."""

    features: torch.Tensor
    logits: torch.Tensor


class CycleGraph(Replayed):
    """The passes of one shape, from what is said of the rows to what comes of them."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: CudaKernels,
        exits: Exits | None,
        branches: Branches | None,
        room: CycleRoom,
        carried: torch.Tensor,
    ) -> None:
        """`carried` goes from one cycle to the next, whatever their shapes."""
        self._adapter, self._cache, self._kernels, self._exits = adapter, cache, kernels, exits
        self.room, self._branches, self._carried = room, branches if room.branches > 1 else None, carried
        device, branch_size = cache.device, cache.block_size if room.branches > 1 else 0
        self._buffer = torch.zeros(room.size, dtype=torch.int32, device=device)
        self._about, self._tables = room.split(self._buffer)
        wide, narrow = cycle_plan.sizes(room.rows, room.drafts, branch_size)
        self._wide = torch.empty(wide, dtype=torch.int64, device=device)
        self._narrow = torch.empty(narrow, dtype=torch.int32, device=device)
        self._parts = parts = cycle_plan.split(self._wide, self._narrow, room.rows, room.drafts, branch_size)
        of_drafts = parts.draft_positions, parts.draft_slots, parts.draft_starts, parts.draft_lens
        self._drafts = [self._view(*(part[ahead] for part in of_drafts), queries=1) for ahead in range(room.drafts)]
        self._deep = self._view(parts.positions, parts.slots, parts.starts, parts.lens, queries=room.drafts + 1)
        self._said = CycleSaid(room.rows, room.drafts, device)
        self._sides = [Side(room, self._said, device) for _ in range(2)]
        self._stay = -1 - torch.arange(room.rows, dtype=torch.int32, device=device)
        """Instead of a position: each row at the place it had."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._shortlist = none if exits is None else exits.shortlist
        self._choice: CycleChoice = Likeliest(kernels, room.rows, room.branches, device)
        if room.draws:
            numbers = room.numbers(self._buffer, torch.float64)
            self._choice = Drawn(kernels, exits, self._about, parts, numbers)
        # Scores, and the peaks they follow from, give way to drafts and the deep pass; but drafts that were drawn are
        # judged by them. What exits remember goes
        # first: its few CTAs would else wait until all of the LM head's have ended.
        rates, apart = room.drafts > 0 and not room.draws, device.type == "cuda"
        self._rating = _side_stream(device, 0) if apart and rates else None
        self._keeping = _side_stream(device, -2) if apart and room.remembers else None

    def _view(self, *indices: torch.Tensor, queries: int) -> KernelView:
        view = KernelView.of_tensors(self._cache, self._kernels, (*indices, self._tables))
        view.limit(queries, self.room.blocks * self._cache.block_size)
        return view

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def capture(self, pool: Any) -> None:
        """It runs once beforehand, without any rows, and changes nothing of what is carried."""
        self._buffer.copy_(self._sides[0].host)
        carried = self._carried.clone()
        super().capture(pool)
        self._carried.copy_(carried)

    def launch(self, rows: Sequence[RowPlace], legs: int = 1) -> tuple[Side, list[int]]:
        """Start so many cycles of these rows, one behind another: one with branches, whose tables change, and where
        rows draw, whose numbers are for one. Returns the side to read them from, and where the tokens of each place
        begin in the deep passes. The launch before the last must have been read."""
        assert legs == 1 or (self.room.branches == 1 and not self.room.draws)
        self._sides.reverse()
        side = self._sides[0]
        side.wait()
        begins = side.rows.fill(rows)
        self._buffer.copy_(side.host, non_blocking=True)
        side.note_begun()
        for leg in range(legs):
            if leg:
                self._about[1].copy_(self._stay)
            self.replay()
            self._said.send(side.landing(leg))
        side.note_sent(legs)
        return side, begins

    def _run(self) -> None:
        size, room = self._cache.block_size, self.room
        spare = 0 if self._branches is None else self._branches.first_spare
        where = self._carried, self._tables, size, room.drafts, self._wide, self._narrow
        self._kernels.plan_cycle(self._about, *where, room.branches, spare)
        said, parts = self._said, self._parts
        if self._branches is not None:
            self._branches.copy(*parts.copies)
        drafts = [self._draft(ahead, view) for ahead, view in enumerate(self._drafts)]
        pending = parts.newest, said.places, self._shortlist, parts.sources
        self._kernels.pending_tokens(*pending, said.drafted, said.token_ids)
        with _stream(self._rating):
            if drafts and self._exits is not None:
                self._exits.rate(torch.cat([made.features for made in drafts]), said.all_peaks, said.scores.flatten())
        exits = self._exits if room.remembers else None
        states = run_deep(self._adapter, self._deep, said.token_ids, exits, lambda: _stream(self._keeping))
        with _stream(self._keeping):
            self._remember(states)
        self._choice.settle(self._adapter.head(states.normed), said)
        of_rows = self._about, parts.starts, parts.positions, said.drafted, said.following
        self._kernels.carry_on(*of_rows, room.branches, self._carried, said.going_on)
        for beside in (self._rating, self._keeping):
            if beside is not None:
                torch.cuda.current_stream().wait_stream(beside)
        if self._branches is not None:  # the branch that was right becomes the row
            source, target, *_ = parts.returns
            self._branches.copy(source, target, Claims(parts.returns[2:], said.following, said.drafted[0]))

    def _remember(self, states: DeepStates) -> None:
        """Deep states and the head's K and V."""
        if self.room.remembers:
            assert self._exits is not None
            parts = self._parts
            self._exits.keep(self._deep, *states[:3], parts.kept_slots, parts.deep_slots, parts.distances)

    def _draft(self, ahead: int, view: KernelView) -> _Made:
        """Say the next tokens, behind those the pass before said; the first pass begins with the newest ones."""
        adapter, exits, parts, said = self._adapter, self._exits, self._parts, self._said
        assert exits is not None
        [checkpoint] = exits.checkpoints
        inputs = adapter.layer_inputs(view.positions, view)
        places, positions = said.places[ahead - 1], view.positions
        states = exits.enter(places, positions) if ahead else adapter.embed(parts.newest, positions)
        states = adapter.run_layers(states, 0, checkpoint.layer, inputs)[0]
        deep = parts.draft_deep_slots, parts.draft_distances[ahead]
        made = _Made(*exits.draft(view, states, *deep))
        with _stream(self._rating):
            exits.peak(made.logits, said.peaks_of(ahead))
        self._choice.draft(ahead, made.logits, said)
        return made


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _side_stream(device: torch.device, priority: int) -> Any:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _stream(other: Any) -> Iterator[None]:
    """On another stream than the current one, if there is one: for what nobody waits for before the end of the cycle.
    What it reads must live till then: whoever held its memory next would not wait for it."""
    if other is None:
        yield
        return
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        yield
