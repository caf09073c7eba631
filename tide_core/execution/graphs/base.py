"""Work of fixed shape on a GPU, captured once as a CUDA graph and replayed from then on.

A pass is some hundreds of small kernels, and launching them one by one takes many times as long as they run. Shapes are
few: tokens and blocks are rounded up to the next size, and the padding belongs to no row.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tide_core.kernels import CudaKernels, Kernels
from tide_core.kv.cache import PagedKV
from tide_core.models.adapter import ModelAdapter

TOKEN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIN_BLOCKS = 64


def unsupported_reason(adapter: ModelAdapter, cache: PagedKV, kernels: Kernels) -> str | None:
    """Why this model cannot run as graphs, or None."""
    if not isinstance(kernels, CudaKernels):
        return f"the {kernels.name} kernels read indices on the host"
    if adapter.gathers_kv:
        return "the layers are handed whole contexts"
    if any(not kernels.supports(*pools) for pools in cache.pools):
        return "no kernel supports these heads"
    if adapter.family.attention == "sinks":
        return "no kernel has attention sinks"
    if adapter.has_experts:
        return "experts are chosen on the host"
    if not adapter.has_fixed_positions:
        return "rotary positions depend on the lengths of the rows"
    return None


def size_for(count: int) -> int:
    """The smallest token size that holds `count`."""
    return next(size for size in TOKEN_SIZES if size >= count)


def blocks_for(count: int) -> int:
    """The block table size that holds `count`. Sizes are far apart: a text that outgrows one waits for new graphs."""
    size = MIN_BLOCKS
    while size < count:
        size *= 4
    return size


class Graph:
    """Work of fixed shape, `_run` of a subclass, captured once and replayed from then on."""

    _graphs: Sequence[Any] = ()
    """One for each stage."""
    _priority = -1
    """Of its kernels: above that of other streams, which is 0 and the lowest."""

    @property
    def pool(self) -> Any:
        """The memory pool of its graph."""
        return self._graphs[0].pool()

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def capture(self, pool: Any) -> None:
        """Capture the work with its current inputs. It runs once before, which writes only what it will write again."""
        with _no_collection():  # it might free another engine's graphs, which a capture does not survive
            self._capture(pool)

    def _capture(self, pool: Any) -> None:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(warm_up):
                for run in self._stages():
                    run()
        finally:
            torch.cuda.current_stream().wait_stream(warm_up)
        stream = torch.cuda.Stream(priority=self._priority)  # type: ignore[no-untyped-call]
        graphs: list[Any] = []
        for run in self._stages():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
            graphs.append(graph)
            pool = graph.pool() if pool is None else pool
        self._graphs = graphs

    def replay(self, stage: int = 0) -> None:
        """All of the work, or one of its stages."""
        if self._graphs:
            self._graphs[stage].replay()
        else:
            self._stages()[stage]()

    def _stages(self) -> Sequence[Callable[[], None]]:
        """What the work consists of: several parts, one after another, where the host acts in between."""
        return (self._run,)

    def _run(self) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
