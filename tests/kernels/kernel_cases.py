"""Factories of kernel inputs; a test names only what it cares about."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# How far two right answers may lie apart: a few roundings of the storage type.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)


@dataclass
class PagedCase:
    """Rows of queries over pages. Every slot at or past a row's context, and every page no row owns, is NaN."""

    contexts: list[int]
    queries: list[int]
    num_kv_heads: int = 2
    group: int = 3
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    scaling: float = 0.125
    window: int = 0
    softcap: float = 0.0
    k_pool: Tensor = field(init=False)
    v_pool: Tensor = field(init=False)
    block_tables: Tensor = field(init=False)
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.contexts)
        blocks = [-(-context // self.block_size) for context in self.contexts]
        max_blocks = max(blocks, default=0) + 1
        pages = torch.randperm(sum(blocks) + 3)
        shape = (len(pages), self.num_kv_heads, self.block_size)
        self.k_pool = torch.full((*shape, self.key_dim), float("nan"), dtype=self.dtype)
        self.v_pool = torch.full((*shape, self.value_dim), float("nan"), dtype=self.dtype)
        self.block_tables = torch.full((rows, max_blocks), -1, dtype=torch.int32)
        used = 0
        for row, context in enumerate(self.contexts):
            self.block_tables[row, : blocks[row]] = pages[used : used + blocks[row]].int()
            used += blocks[row]
            for position in range(context):
                page, slot = self.block_tables[row, position // self.block_size], position % self.block_size
                self.k_pool[page, :, slot] = torch.randn(self.num_kv_heads, self.key_dim).to(self.dtype)
                self.v_pool[page, :, slot] = torch.randn(self.num_kv_heads, self.value_dim).to(self.dtype)
        heads = self.num_kv_heads * self.group
        # As Hugging Face hands it over: [1, heads, T, D], whose transpose has free strides on T and heads.
        self.q = torch.randn(1, heads, sum(self.queries), self.key_dim).to(self.dtype).transpose(1, 2)[0]

    @property
    def query_starts(self) -> Tensor:
        return torch.tensor([0, *self.queries]).cumsum(0).int()

    @property
    def context_lens(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, float]:
        return (
            self.q,
            self.k_pool,
            self.v_pool,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.scaling,
            self.window,
            self.softcap,
        )
