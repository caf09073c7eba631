"""The view of the pool for a GPU, where every launch and every transfer costs more than what it does.

All that a step's layers need to know of its indices travels in one transfer, nothing in a layer waits for the device,
and in half precision the attention of all rows, whatever their lengths, is one launch of Torch's own flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tide_core.kernels import Kernels
from tide_core.kernels.reference import ops as reference
from tide_core.kv.cache import PagedKV, PagedView, RowSpan, StepIndex

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_SIZES = range(8, 257, 8)


class DeviceView(PagedView):
    """Same promises as `PagedView`."""

    def __init__(self, cache: PagedKV, kernels: Kernels, spans: Sequence[RowSpan]) -> None:
        index = StepIndex.build(spans, cache.block_size)
        arrays = device_arrays(index, cache.block_size)
        sent = torch.from_numpy(np.concatenate(arrays)).to(cache.device)
        self._take(cache, kernels, index, torch.split(sent, [len(array) for array in arrays]))
        self._max_queries = int(np.diff(index.query_starts).max(initial=0))
        self._max_context = int(index.context_lens.max(initial=0))

    def _take(self, cache: PagedKV, kernels: Kernels, index: StepIndex, sent: Sequence[torch.Tensor]) -> None:
        """What `device_arrays` gave, on the device."""
        self._cache = cache
        self._kernels = kernels
        self._index = index
        self.positions, self.slots, self._blocks, self._offsets = sent[:4]
        self._context_blocks, self._context_offsets = sent[4:6]
        self._starts = tuple(sent[6:])

    @cached_property
    def _cumulative(self) -> tuple[torch.Tensor, ...]:
        """Where each row's queries and its context begin, and where the last ones end, [R + 1] int32 each."""
        return tuple(starts.int() for starts in self._starts)

    @cached_property
    def _query_starts(self) -> torch.Tensor:  # on the host, where the plain attention reads them without waiting
        return torch.from_numpy(self._index.query_starts)

    @cached_property
    def _context_lens(self) -> torch.Tensor:
        return torch.from_numpy(self._index.context_lens)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key_pool, value_pool = self._cache.pools[layer]
        key_pool[self._blocks, :, self._offsets] = key
        value_pool[self._blocks, :, self._offsets] = value

    def attend_paged(
        self, layer: int, query: torch.Tensor, scaling: float, window: int = 0, softcap: float = 0.0
    ) -> torch.Tensor:
        key_pool, value_pool = self._cache.pools[layer]
        if softcap > 0 or not flash_supports(key_pool, value_pool):
            starts, lens = self._query_starts, self._context_lens
            tables = self._block_tables
            return reference.paged_attention(
                query, key_pool, value_pool, tables, starts, lens, scaling, window, softcap
            )
        query_starts, context_starts = self._cumulative
        attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query,
            key_pool[self._context_blocks, :, self._context_offsets],
            value_pool[self._context_blocks, :, self._context_offsets],
            query_starts,
            context_starts,
            self._max_queries,
            self._max_context,
            0.0,  # no dropout
            True,  # causal: the last query sees the last key
            False,
            scale=scaling,
            window_size_left=window - 1 if window > 0 else None,
            window_size_right=0 if window > 0 else None,
        )[0]
        return attended


def device_arrays(index: StepIndex, block_size: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """All that layers on a device need of a step: positions and slots of its tokens, blocks and offsets of these,
    blocks and offsets of all contexts, where each row's queries begin and where its context does."""
    context_slots = index.context_slots(block_size)[0]
    return [
        index.positions,
        index.slots,
        *np.divmod(index.slots, block_size),
        *np.divmod(context_slots, block_size),
        index.query_starts.astype(np.int64),
        np.concatenate(([0], np.cumsum(index.context_lens, dtype=np.int64))),
    ]


def flash_supports(key_pool: torch.Tensor, value_pool: torch.Tensor) -> bool:
    """Whether Torch's flash attention knows such keys and values."""
    size = key_pool.shape[-1]
    fits = value_pool.shape[-1] == size and size in FLASH_SIZES
    return fits and key_pool.is_cuda and key_pool.dtype in FLASH_DTYPES
