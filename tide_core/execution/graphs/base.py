"""Work of fixed shape on a GPU, captured once as a CUDA graph and replayed from then on.

A pass is some hundreds of small kernels, and launching them one by one takes many times as long as they run. Shapes are
few: tokens and blocks are rounded up to the next size, and the padding belongs to no row.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
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

    _graph: Any = None
    _priority = -1
    """Of its kernels: above that of other streams, which is 0 and the lowest."""

    @property
    def pool(self) -> Any:
        """The memory pool of its graph."""
        return self._graph.pool()

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def capture(self, pool: Any) -> None:
        """Capture the work with its current inputs. It runs once before, which writes only what it will write again."""
        with _no_collection():  # it might free another engine's graphs, which a capture does not survive
            self._capture(pool)

    def _capture(self, pool: Any) -> None:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(warm_up):
                self._run()
        finally:
            torch.cuda.current_stream().wait_stream(warm_up)
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


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
