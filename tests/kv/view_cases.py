"""Rows over a pool of pages, seen through any kind of view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.factories import poison
from tide_core.kernels import Kernels, reference_kernels
from tide_core.kv.cache import KVLayout, PagedKV, PagedView, RowSpan

BLOCK = 4
NUM_HEADS = 4


@dataclass(frozen=True)
class ViewCase:
    """(tokens before, tokens now) of each row. What no row has written is NaN."""

    rows: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    head_size: int = 16
    window: int = 0
    softcap: float = 0.0
    kernels: Kernels = field(default_factory=reference_kernels)

    def through(self, kind: type[PagedView]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens now through a view and attend; returns what came out and all of the key pool."""
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(self.device, self.dtype)

        needed = [-(-(start + count) // BLOCK) for start, count in self.rows]
        pages = torch.randperm(sum(needed) + 2, generator=random).tolist()
        layout = KVLayout(2, self.head_size, self.head_size)
        cache = PagedKV([layout], len(pages), BLOCK, self.dtype, torch.device(self.device))
        poison(cache, range(len(pages)))
        spans = []
        for (start, count), blocks in zip(self.rows, needed, strict=True):
            spans.append(RowSpan([pages.pop() for _ in range(blocks)], start, count))
        for span in spans:
            if span.start:
                before = PagedView(cache, reference_kernels(), [RowSpan(span.block_ids, 0, span.start)])
                before.write(0, draw(span.start, 2, self.head_size), draw(span.start, 2, self.head_size))
        total = sum(span.num_tokens for span in spans)
        view = kind(cache, self.kernels, spans)
        view.write(0, draw(total, 2, self.head_size), draw(total, 2, self.head_size))
        out = view.attend_paged(0, draw(total, NUM_HEADS, self.head_size), 0.25, self.window, self.softcap)
        return out, cache.pools[0][0]


SHAPES = [[(0, 1)], [(9, 1)], [(9, 5)], [(0, 7), (3, 1), (12, 4)], [(4, 1), (8, 1), (31, 1)]]
