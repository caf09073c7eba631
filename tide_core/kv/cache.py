"""The KV block pool as tensors, and the view of it that one step's layers use.

Pools are [num_blocks, heads, block_size, head size], one pair per layer, so that one head's slots of a block lie
together. They are allocated without being touched: on a CPU the memory becomes real block by block, as tokens fill it,
and all pools are one piece, which the system has back as soon as they are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tide_core.batch import KVWritten
from tide_core.kernels import Kernels
from tide_core.kernels.reference import ops as reference

ALIGNED = 64
"""Each tensor of a pool on a CPU begins at a multiple of so many elements."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one layer caches per token."""

    num_heads: int
    key_size: int
    value_size: int

    @property
    def num_elements(self) -> int:
        return self.num_heads * (self.key_size + self.value_size)


def block_bytes(
    layouts: Sequence[KVLayout], block_size: int, dtype: torch.dtype, *, state_widths: Sequence[int] = ()
) -> int:
    """Memory of one block over all layers."""
    return (sum(layout.num_elements for layout in layouts) + sum(state_widths)) * block_size * dtype.itemsize


class PagedKV:
    """The pools of all layers; those of exit heads with attention come after the model's.

    For every checkpoint a slot also holds the deep state of its token that the exit head there is fed with,
    [num_blocks * block_size, d] in `deep_states`, d being the width the head works at, or 0 for a head that is not fed
    with one: it is paged, shared and freed with the K and V it belongs to."""

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        state_widths: Sequence[int] = (),
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.device = device
        pages = [(num_blocks, layout.num_heads, block_size) for layout in layouts]
        shapes: list[tuple[int, ...]] = [(num_blocks * block_size, width) for width in state_widths]
        for page, layout in zip(pages, layouts, strict=True):
            shapes += [(*page, layout.key_size), (*page, layout.value_size)]
        buffers = iter(_buffers(shapes, dtype, device))
        self.deep_states = [next(buffers) for _ in state_widths]
        self.workspaces: list[torch.Tensor] = []
        """What attention works in, where it wants memory: the last is the largest. Those before it stay as long as
        graphs that were captured with them may run."""
        self.pools = [(next(buffers), next(buffers)) for _ in layouts]

    def blank(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, so that they can be read as if tokens had been there."""
        index = torch.tensor(blocks, device=self.device)
        for key_pool, value_pool in self.pools:
            key_pool[index] = 0.0
            value_pool[index] = 0.0
        for states in self.deep_states:
            states.view(self.num_blocks, -1)[index] = 0.0


def _buffers(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Untouched. On a CPU in one piece: the allocator keeps freed pieces of some MiB for itself, and a pool that is
    dropped after a change of the artefact would stay in memory. The allocator of a GPU gives them to the next pool."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
    whole = torch.empty(ends[-1] if ends else 0, dtype=dtype)
    starts = [0, *ends[:-1]]
    return [whole[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row in a step: where its blocks are, where its tokens begin, how many run now."""

    block_ids: Sequence[int]
    start: int
    num_tokens: int


class PagedView:
    """The cache as the layers of one step see it: T tokens of R rows, one after another.

    Writes only the slots of this step's tokens; reads only slots below each row's start plus its tokens now.
    """

    write_only = False

    def __init__(self, cache: PagedKV, kernels: Kernels, spans: Sequence[RowSpan]) -> None:
        self._cache = cache
        self._kernels = kernels
        index = StepIndex.build(spans, cache.block_size)
        self.positions = torch.from_numpy(index.positions).to(cache.device)
        self.slots = torch.from_numpy(index.slots).to(cache.device)
        self._index = index

    @cached_property
    def _block_tables(self) -> torch.Tensor:
        return torch.from_numpy(self._index.block_tables).to(self._cache.device)

    @cached_property
    def _query_starts(self) -> torch.Tensor:
        return torch.from_numpy(self._index.query_starts).to(self._cache.device)

    @cached_property
    def _context_lens(self) -> torch.Tensor:
        return torch.from_numpy(self._index.context_lens).to(self._cache.device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """K and V of this step's tokens, [T, H, D] each, into the pools of `layer`."""
        key_pool, value_pool = self._cache.pools[layer]
        self._kernels.write_kv(key, value, key_pool, value_pool, self.slots)

    def attend_paged(
        self, layer: int, query: torch.Tensor, scaling: float, window: int = 0, softcap: float = 0.0
    ) -> torch.Tensor:
        """Attention of this step's queries, [T, H, D], over each row's pages of `layer`; returns [T, H, Dv]."""
        key_pool, value_pool = self._cache.pools[layer]
        return self._kernels.paged_attention(
            query,
            key_pool,
            value_pool,
            self._block_tables,
            self._query_starts,
            self._context_lens,
            scaling,
            window,
            softcap,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = query[0].transpose(0, 1)
        if sinks is None:
            return self.attend_paged(layer, query, scaling, window, softcap).unsqueeze(0)
        assert softcap <= 0, "no family has both sinks and soft-capping"
        return self._attend_with_sinks(layer, query, scaling, window, sinks).unsqueeze(0)

    def _attend_with_sinks(
        self, layer: int, query: torch.Tensor, scaling: float, window: int, sinks: torch.Tensor
    ) -> torch.Tensor:
        """In plain Torch on every device: no kernel has sinks."""
        index, pools = self._index, self._cache.pools[layer]
        starts, lens = torch.from_numpy(index.query_starts), torch.from_numpy(index.context_lens)
        return reference.paged_attention(query, *pools, self._block_tables, starts, lens, scaling, window, sinks=sinks)


class GatheredView(PagedView):
    """For layers that must see K and V themselves (compressed latents, attention written inline in the layer).

    `update` returns the contexts of all rows, one after another; `mask` holds which query may attend to which of them.
    """

    def __init__(self, cache: PagedKV, kernels: Kernels, spans: Sequence[RowSpan]) -> None:
        super().__init__(cache, kernels, spans)
        slots, rows, positions = self._index.context_slots(cache.block_size)
        self._context_slots = torch.from_numpy(slots).to(cache.device)
        self.context_positions = torch.from_numpy(positions).to(cache.device)
        context_rows = torch.from_numpy(rows).to(cache.device)
        query_rows = torch.from_numpy(self._index.query_rows()).to(cache.device)
        self.mask = (query_rows[:, None] == context_rows[None, :]) & (
            self.context_positions[None, :] <= self.positions[:, None]
        )  # [T, contexts]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        super().update(key, value, layer)
        key_pool, value_pool = self._cache.pools[layer]
        return self._gather(key_pool), self._gather(value_pool)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert window <= 0, "gathered attention serves no family with a sliding window"
        assert softcap <= 0, "gathered attention serves no family with soft-capping"
        assert sinks is None, "gathered attention serves no family with sinks"
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)

    def _gather(self, pool: torch.Tensor) -> torch.Tensor:
        block, offset = self._context_slots // self._cache.block_size, self._context_slots % self._cache.block_size
        return pool[block, :, offset].transpose(0, 1).unsqueeze(0)  # [1, H, contexts, D]


class WriteOnlyView(PagedView):
    """For tokens that skip a layer and leave only their K and V there: it ends as soon as they are written."""

    write_only = True

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        super().update(key, value, layer)
        raise KVWritten


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Where every token of a step is written and read, as flat arrays."""

    positions: np.ndarray[Any, np.dtype[np.int64]]
    slots: np.ndarray[Any, np.dtype[np.int64]]
    block_tables: np.ndarray[Any, np.dtype[np.int32]]
    query_starts: np.ndarray[Any, np.dtype[np.int32]]
    context_lens: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    def build(cls, spans: Sequence[RowSpan], block_size: int) -> StepIndex:
        if all(span.num_tokens == 1 for span in spans):
            return cls._of_single_tokens(spans, block_size)
        ends = [span.start + span.num_tokens for span in spans]
        begins = list(accumulate([span.num_tokens for span in spans], initial=0))
        used = [-(-end // block_size) for end in ends]
        block_tables = np.zeros((len(spans), max(used)), dtype=np.int32)
        positions = np.empty(begins[-1], dtype=np.int64)
        slots = np.empty_like(positions)
        offsets = np.arange(block_size)
        for row, (span, begin, end, count) in enumerate(zip(spans, begins, ends, used, strict=False)):
            blocks = np.array(span.block_ids[:count], dtype=np.int64)
            block_tables[row, :count] = blocks
            here = slice(begin, begin + span.num_tokens)
            positions[here] = np.arange(span.start, end)
            first = span.start // block_size  # whole blocks from there on, then the part of them that is the span's
            of_blocks = (blocks[first:, None] * block_size + offsets).ravel()
            slots[here] = of_blocks[span.start - first * block_size : end - first * block_size]
        return cls(positions, slots, block_tables, np.array(begins, dtype=np.int32), np.array(ends, dtype=np.int32))

    @classmethod
    def _of_single_tokens(cls, spans: Sequence[RowSpan], block_size: int) -> StepIndex:
        """The same for one token a row, in a few calls: drafting builds one for every token."""
        starts = [span.start for span in spans]
        used = [start // block_size + 1 for start in starts]
        widest = max(used, default=0)
        tables = [[*span.block_ids[:count], *([0] * (widest - count))] for span, count in zip(spans, used, strict=True)]
        slots = [
            span.block_ids[start // block_size] * block_size + start % block_size
            for span, start in zip(spans, starts, strict=True)
        ]
        return cls(
            positions=np.array(starts, dtype=np.int64),
            slots=np.array(slots, dtype=np.int64),
            block_tables=np.array(tables, dtype=np.int32).reshape(len(spans), widest),
            query_starts=np.arange(len(spans) + 1, dtype=np.int32),
            context_lens=np.array(starts, dtype=np.int32) + 1,
        )

    def query_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row of every query."""
        return np.repeat(np.arange(len(self.context_lens)), np.diff(self.query_starts))

    def context_slots(
        self, block_size: int
    ) -> tuple[
        np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]
    ]:
        """Slot, row and position of every valid token of every row."""
        rows = np.repeat(np.arange(len(self.context_lens)), self.context_lens)
        positions = (
            np.concatenate([np.arange(length, dtype=np.int64) for length in self.context_lens])
            if len(self.context_lens)
            else np.empty(0, dtype=np.int64)
        )
        blocks = self.block_tables[rows, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size, rows, positions
