"""A pass of fixed shape on a GPU, captured once as a graph and replayed from then on.

A pass is some hundreds of small kernels, and launching them one by one takes many times as long as they run. It reads
its tokens and indices from one buffer on the device, filled in one transfer, and leaves its results where they always
are, until the next pass runs. Shapes are few: tokens and blocks are counted up to the next size, and what is filled up
belongs to no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from tide_core.kernels import CudaKernels, Kernels
from tide_core.kv.cache import PagedKV, StepIndex
from tide_core.kv.kernel_view import FEW_QUERIES, KernelView, Other, Room
from tide_core.models.adapter import ModelAdapter

TOKEN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEWEST_BLOCKS = 16


def obstacle(adapter: ModelAdapter, cache: PagedKV, kernels: Kernels) -> str | None:
    """Why passes of this model cannot be captured, or None."""
    if not isinstance(kernels, CudaKernels):
        return f"the {kernels.name} kernels read indices on the host"
    if adapter.gathers_kv:
        return "the layers are handed whole contexts"
    if any(not kernels.takes(*pools) for pools in cache.pools):
        return "no kernel knows these heads"
    if adapter.has_experts:
        return "experts are chosen on the host"
    if not adapter.has_fixed_positions:
        return "rotary positions depend on the lengths of the rows"
    return None


def room_for(index: StepIndex, others: int) -> Room:
    """The smallest shape that holds a step; its rows are as many as its tokens."""
    num_tokens, blocks = len(index.positions), index.block_tables.shape[1]
    tokens = next(size for size in TOKEN_SIZES if size >= num_tokens)
    return Room(tokens, tokens, max(FEWEST_BLOCKS, 1 << max(0, blocks - 1).bit_length()), others)


class CapturedPass(KernelView):
    """The view that the pass's own layers see. What it runs is `_run`, in a class of its own."""

    def __init__(self, cache: PagedKV, kernels: CudaKernels, room: Room) -> None:
        self._room = room
        self._host = torch.zeros(room.size, dtype=torch.int32, pin_memory=cache.device.type == "cuda")
        self._device = torch.zeros(room.size, dtype=torch.int32, device=cache.device)
        *self.others, positions, slots, starts, lens, tables = room.split(self._device)
        self._take(cache, kernels, StepIndex.build([], cache.block_size), (positions, slots, starts, lens, tables))
        self._max_queries, self._max_context = FEW_QUERIES, room.blocks * cache.block_size
        self._graph: Any = None
        self._sent: Any = None
        """When the last transfer is done."""

    def load(self, index: StepIndex, others: Sequence[Other]) -> None:
        """Bring a step's indices to the device, and what else the pass reads of every token."""
        if self._sent is not None:  # the transfer before this one may still read the buffer
            self._sent.synchronize()
        self._index = index
        self._room.fill(self._host.numpy(), index, others)
        self._device.copy_(self._host, non_blocking=True)
        if self._device.is_cuda:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()

    @property
    def pool(self) -> Any:
        """Where its graph has its memory."""
        return self._graph.pool()

    def capture(self, pool: Any) -> None:
        """Capture the pass as it is loaded. It runs once beforehand, which writes only what it will write again."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    def replay(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def fill(self, more: Any) -> None:
        """Bring what else the pass takes."""

    def _run(self) -> None:
        raise NotImplementedError


One = TypeVar("One", bound=CapturedPass)


class Passes(Generic[One]):
    """Passes by their shape, each made when it is first wanted. Graphs share memory: one runs at a time."""

    def __init__(self, *, capture: bool) -> None:
        """Without `capture` the same passes run op by op."""
        self._capture = capture
        self._by_shape: dict[object, One] = {}
        self._pool: Any = None

    def ready(
        self,
        shape: object,
        make: Callable[[], One],
        index: StepIndex,
        others: Sequence[Other],
        more: Any = None,
    ) -> One:
        """The pass of this shape, loaded, to be replayed."""
        fresh = shape not in self._by_shape
        if fresh:
            self._by_shape[shape] = make()
        one = self._by_shape[shape]
        one.load(index, others)
        one.fill(more)
        if fresh and self._capture:
            one.capture(self._pool)
            self._pool = one.pool
        return one
