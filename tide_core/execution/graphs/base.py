"""A pass of fixed shape on a GPU, captured once as a graph and replayed from then on.

A pass is some hundreds of small kernels, and launching them one by one takes many times as long as they run. It reads
its tokens and indices from one buffer on the device, filled in one transfer, and leaves its results where they always
are, until the next pass runs. Shapes are few: tokens and blocks are counted up to the next size, and what is filled up
belongs to no row.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from tide_core.kernels import CudaKernels, Kernels
from tide_core.kv.cache import PagedKV, StepIndex
from tide_core.kv.kernel_view import FEW_QUERIES, KernelView, Other, Room
from tide_core.models.adapter import ModelAdapter

Step = tuple[StepIndex, Sequence[Other]]
"""What a pass is loaded with."""
TOKEN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEWEST_BLOCKS = 64


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
    tokens = size_for(num_tokens)
    return Room(tokens, tokens, blocks_for(blocks), others)


def size_for(count: int) -> int:
    """The size of passes with so many tokens."""
    return next(size for size in TOKEN_SIZES if size >= count)


def blocks_for(count: int) -> int:
    """The size of tables of so many blocks. Sizes are far apart: a text that grows past one waits for new graphs."""
    size = FEWEST_BLOCKS
    while size < count:
        size *= 4
    return size


class Buffer:
    """Indices on the host and on the device."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host, self.device, self.numpy = host, device, host.numpy()
        self._sent: Any = torch.cuda.Event() if device.is_cuda else None  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, size: int, device: torch.device) -> Buffer:
        host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(host, torch.zeros(size, dtype=torch.int32, device=device))

    def parts(self, num: int) -> list[Buffer]:
        """As many equal parts of it."""
        return [Buffer(*pair) for pair in zip(self.host.chunk(num), self.device.chunk(num), strict=True)]

    def wait(self) -> None:
        """Until the last transfer is done, so that the host's side can be written again."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()

    def send(self) -> None:
        self.device.copy_(self.host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Replayed:
    """Work of fixed shape, `_run` in a class of its own, which is captured once and replayed from then on."""

    _graph: Any = None
    _priority = -1
    """Of its kernels on the device: above that of other streams, which is 0 and the lowest."""

    @property
    def pool(self) -> Any:
        """Where its graph has its memory."""
        return self._graph.pool()

    def capture(self, pool: Any) -> None:
        """Capture the work as it is loaded. It runs once beforehand, which writes only what it will write again."""
        with _no_collection():  # what it frees might be another engine's graphs, which a capture does not survive
            self._capture(pool)

    def _capture(self, pool: Any) -> None:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(beside):
                self._run()
        finally:
            torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(priority=self._priority)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    def replay(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def _run(self) -> None:
        raise NotImplementedError


class CapturedPass(Replayed, KernelView):
    """The view that the pass's own layers see."""

    _may_gather = False

    def __init__(self, cache: PagedKV, kernels: CudaKernels, room: Room, buffer: Buffer | None = None) -> None:
        """With a `buffer` of its size, or a part of one, it is loaded by whoever has that."""
        self._room = room
        self._buffer = Buffer.of(room.size, cache.device) if buffer is None else buffer
        *self.others, positions, slots, starts, lens, tables = room.split(self._buffer.device)
        self._take(cache, kernels, StepIndex.build([], cache.block_size), (positions, slots, starts, lens, tables))
        self.limit(FEW_QUERIES, room.blocks * cache.block_size)

    def load(self, steps: Sequence[Step]) -> None:
        """Bring a step's indices to the device, and what else the pass reads of every token."""
        self._buffer.wait()
        [step] = steps
        self.write_down(step)
        self._buffer.send()

    def write_down(self, step: Step) -> None:
        """A step's indices, on the host as yet."""
        self._index, others = step
        self._room.fill(self._buffer.numpy, self._index, others)

    def enter(self, entering: torch.Tensor) -> None:
        """What the pass takes that is on the device already."""
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
        steps: Sequence[Step],
        entering: torch.Tensor | None = None,
    ) -> One:
        """The pass of this shape, loaded, to be replayed."""
        fresh = shape not in self._by_shape
        if fresh:
            self._by_shape[shape] = make()
        one = self._by_shape[shape]
        one.load(steps)
        if entering is not None:
            one.enter(entering)
        if fresh and self._capture:
            one.capture(self._pool)
            self._pool = one.pool
        return one
