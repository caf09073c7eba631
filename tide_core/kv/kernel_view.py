"""The view of the pool for our CUDA kernels: pages are read in place, and nothing waits for the host.

All indices of a step are in one buffer, so that one transfer copies them and a graph finds them at a fixed address:

    64-bit   further columns of the tokens, then their positions and slots
    32-bit   where each row's queries begin, how long its context is, and its blocks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from tide_core.batch import FEW_QUERIES, Rotation
from tide_core.kernels import CudaKernels, Kernels
from tide_core.kernels.cuda.checks import MOST_JOINED_QUERIES
from tide_core.kv.cache import GatheredView, PagedKV, PagedView, RowSpan, StepIndex, WriteOnlyView
from tide_core.kv.device_view import DeviceView, flash_supports

FEW_POSITIONS = 32768
"""Capacity of all rows together; with more, rotating and attending several queries of a row takes as long in two
launches as in one."""

Array = np.ndarray[Any, Any]


class Column(NamedTuple):
    """A number of every token."""

    values: Array
    padding: int


def view_kind(cache: PagedKV, kernels: Kernels, *, gathers_kv: bool) -> Callable[..., PagedView]:
    """The view for the pool's device; `gathers_kv`: layers take whole contexts."""
    if gathers_kv:
        return GatheredView
    if isinstance(kernels, CudaKernels) and all(kernels.supports(*pools) for pools in cache.pools):
        return KernelView
    return DeviceView if cache.device.type == "cuda" else PagedView


def write_only_kind(kind: Callable[..., PagedView]) -> type[WriteOnlyView]:
    """For tokens that skip layers, where those that run through them have a view of this kind."""
    return WriteOnlyKernelView if kind is KernelView else WriteOnlyView


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """Capacity of a buffer of indices: tokens, rows, blocks of a row, and further columns of every token."""

    tokens: int
    rows: int
    blocks: int
    columns: int = 0

    @property
    def size(self) -> int:
        """In 32-bit words; even, so that 64-bit parts stay aligned."""
        used = 2 * self.tokens * (self.columns + 2) + 2 * self.rows + 1 + self.rows * self.blocks
        return used + used % 2

    @property
    def _borders(self) -> tuple[int, int, int]:
        """Where the 32-bit parts end."""
        return self.rows + 1, 2 * self.rows + 1, 2 * self.rows + 1 + self.rows * self.blocks

    def fill(self, host: Array, index: StepIndex, columns: Sequence[Column] = ()) -> None:
        """Write a step's indices. The padding belongs to no row: its slot is -1."""
        wide = host[: 2 * self.tokens * (self.columns + 2)].view(np.int64).reshape(-1, self.tokens)
        narrow = host[wide.size * 2 :]
        num_tokens, num_rows = len(index.positions), len(index.context_lens)
        for row, (values, padding) in enumerate((*columns, (index.positions, 0), (index.slots, -1))):
            wide[row, :num_tokens] = values
            wide[row, num_tokens:] = padding
        starts_end, lens_end, tables_end = self._borders
        starts, lens, tables = narrow[:starts_end], narrow[starts_end:lens_end], narrow[lens_end:tables_end]
        starts[: num_rows + 1], starts[num_rows + 1 :] = index.query_starts, num_tokens
        lens[:num_rows], lens[num_rows:] = index.context_lens, 0
        tables.reshape(self.rows, self.blocks)[:num_rows, : index.block_tables.shape[1]] = index.block_tables

    def split(self, sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The buffer as its parts: columns and positions and slots, starts, lengths, tables."""
        wide = sent[: 2 * self.tokens * (self.columns + 2)].view(torch.int64).view(-1, self.tokens)
        starts, lens, tables, _ = torch.tensor_split(sent[2 * wide.numel() :], self._borders)
        return *wide.unbind(), starts, lens, tables.view(self.rows, self.blocks)


class KernelView(PagedView):
    """Same promises as `PagedView`."""

    _kernels: CudaKernels
    _may_gather = True
    """Whether the host knows the rows, so that long queries can attend over gathered contexts."""

    def __init__(self, cache: PagedKV, kernels: CudaKernels, spans: Sequence[RowSpan]) -> None:
        index = StepIndex.build(spans, cache.block_size)
        layout = IndexLayout(len(index.positions), *index.block_tables.shape)
        host = np.empty(layout.size, dtype=np.int32)
        layout.fill(host, index)
        self._take(cache, kernels, index, layout.split(torch.from_numpy(host).to(cache.device)))
        self._spans = spans
        self._max_queries = int(np.diff(index.query_starts).max(initial=0))
        self._max_context = int(index.context_lens.max(initial=0))

    @classmethod
    def of_tensors(cls, cache: PagedKV, kernels: CudaKernels, parts: Sequence[torch.Tensor]) -> KernelView:
        """Over indices on the device: positions, slots, starts, lengths, tables."""
        view = cls.__new__(cls)
        view._take(cache, kernels, StepIndex.build([], cache.block_size), parts)
        return view

    def limit(self, max_queries: int, max_context: int) -> None:
        """Most queries and positions of a row, where the host does not know the indices."""
        self._max_queries, self._max_context = max_queries, max_context

    def _take(self, cache: PagedKV, kernels: CudaKernels, index: StepIndex, parts: Sequence[torch.Tensor]) -> None:
        """The last parts of a split buffer: positions, slots, starts, lengths, tables."""
        self._cache, self._kernels, self._index = cache, kernels, index
        self._workspaces = cache.workspaces
        self.positions, self.slots = parts[:2]
        self._starts, self._lens, self._tables = parts[2:]

    @property
    def kernels(self) -> CudaKernels:
        return self._kernels

    def attend_paged(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
        *,
        fresh: bool = False,
    ) -> torch.Tensor:
        """`fresh`: the launch before wrote the keys and values of these queries, and no columns."""
        pools = self._cache.pools[layer]
        if self._may_gather and self._max_queries > FEW_QUERIES and softcap <= 0 and flash_supports(*pools):
            return self._gathering.attend_paged(layer, query, scaling, window)
        return self._kernels.attend(
            query,
            *pools,
            self._tables,
            self._starts,
            self._lens,
            scaling,
            window,
            softcap,
            max_queries=self._max_queries,
            max_context=self._max_context,
            workspace=self._workspace(query),
            queries_are_new=fresh,
        )

    def attend_joined(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        eps: float,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        """From the joined projection [T, (Hq + 2 H) D] to what attention gives, [T, Hq, D]; K and V are written."""
        pools = self._cache.pools[layer]
        if not self._joins or not self._kernels.supports_joined(*pools):
            query = self._kernels.rotary_write(qkv, *rotation, self.slots, *pools, *norms, eps)
            return self.attend_paged(layer, query, scaling, window, fresh=True)
        head_dim = pools[0].shape[3]
        heads = qkv.view(len(qkv), -1, head_dim)
        return self._kernels.attend_joined(
            qkv,
            *rotation,
            self.slots,
            *pools,
            *norms,
            eps,
            self._tables,
            self._starts,
            self._lens,
            scaling,
            window,
            max_queries=max(self._max_queries, 1),
            max_context=self._max_context,
            workspace=self._workspace(heads[:, 2 * pools[0].shape[1] :]),
        )

    @property
    def _joins(self) -> bool:
        """Whether one launch is faster than two; the bits are the same."""
        few = len(self._lens) * self._max_context <= FEW_POSITIONS
        return self._max_queries <= (MOST_JOINED_QUERIES if few else 1)

    def write_joined(
        self,
        layer: int,
        keys_values: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        """K and V of a joined projection [T, 2 H D], at the view's own slots or columns: some tokens may have none."""
        self._kernels.rotary_write(keys_values, *rotation, slots, *self._cache.pools[layer], None, k_norm, eps)

    def _workspace(self, query: torch.Tensor) -> torch.Tensor:
        """One for all layers and all passes that run one after another."""
        workspaces = self._workspaces
        held = workspaces[-1] if workspaces else None
        made = self._kernels.attention_workspace(*query.shape, self._max_context, query.device, held)
        if made is not held:
            workspaces.append(made)
        return made

    @cached_property
    def _gathering(self) -> DeviceView:
        """For long prompts."""
        return DeviceView(self._cache, self._kernels, self._spans)


class WriteOnlyKernelView(WriteOnlyView, KernelView):
    """`WriteOnlyView` for fused layers: they project K and V alone and write them in one launch."""
