"""Attention that reads pages before the kernels of its pass have ended, on the GPU: the bits of one that waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import DEVICE, assert_same, randn
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.cuda.attention import attention_workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
GROUP, BLOCK, LAYERS, STEPS = 4, 16, 3, 12
VOCABULARY = 50


@pytest.fixture(autouse=True)
def _a_device_that_joins() -> None:
    torch.manual_seed(0)
    pool = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=DEVICE)
    if not cuda.supports_joined(pool, pool):
        pytest.skip("this GPU has no joined attention")


def _nothing(x: Tensor) -> None:
    """Steps follow each other as they do."""


def settle_nothing(x: Tensor) -> None:
    """A launch that may write pages, as far as is known: nobody behind it reads ahead."""
    cuda.scatter_rows(x[:1], torch.full((1,), -1, device=DEVICE), torch.empty_like(x))


@dataclasses.dataclass
class Text:
    """Rows that say STEPS tokens; each passes some layers, whose pages the steps behind it read."""

    rows: int
    context: int
    dim: int
    heads: int
    width: int
    dtype: torch.dtype
    embeds: bool = True
    """Whether every step begins with a look-up, which settles what was written before; else only the first one does."""
    queries: int = 1
    """Tokens that a row says in a step."""
    joined: bool = True
    """Whether keys and values are written by the launch that attends, or by one before it."""
    waits: bool = False
    """Whether nobody reads ahead of that."""

    def __post_init__(self) -> None:
        self.most = self.context + STEPS * self.queries
        blocks = -(-self.most // BLOCK)
        self.tables = torch.randperm(self.rows * blocks, device=DEVICE).int().view(self.rows, blocks)
        shape = self.rows * blocks, self.heads, BLOCK, self.dim
        self.pools = [randn(*shape, dtype=self.dtype) for _ in range(2 * LAYERS)]
        self.starts = self.queries * torch.arange(self.rows + 1, dtype=torch.int32, device=DEVICE)
        inner = self.heads * GROUP * self.dim
        self.qkv = randn((GROUP + 2) * self.heads * self.dim, self.width, dtype=self.dtype) / self.width**0.5
        self.out = randn(self.width, inner, dtype=self.dtype) / inner**0.5
        self.cos, self.sin = (randn(self.most, self.dim, dtype=self.dtype) for _ in range(2))
        self.embedding = randn(VOCABULARY, self.width, dtype=self.dtype)
        sizes = self.rows * self.queries, self.heads * GROUP, self.dim, self.most
        self.workspace = attention_workspace(*sizes, torch.device(DEVICE))  # none is made in between
        token = torch.arange(self.rows * self.queries, device=DEVICE)
        row, query = token // self.queries, token % self.queries
        self.places = []
        for step in range(STEPS):
            at = self.context + step * self.queries + query
            slots = self.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK
            lens = torch.full_like(self.starts[1:], self.context + (step + 1) * self.queries)
            self.places.append(((7 * token + step) % VOCABULARY, at, slots, lens))

    def run(self, pools: list[Tensor], after_embedding: Callable[[Tensor], None] = _nothing) -> list[Tensor]:
        said: list[Tensor] = []
        self.waits = after_embedding is not _nothing
        for token_ids, *places in self.places:
            if self.embeds or not said:
                x = first = cuda.embed(token_ids, self.embedding)
                after_embedding(x)
            for layer in range(LAYERS):
                qkv = cuda.linear(x, self.qkv)
                attended = self.attend(qkv, places, pools[2 * layer : 2 * layer + 2])
                x = cuda.linear(attended.flatten(1), self.out, residual=first)
            said.append(x)
        return said

    def attend(self, qkv: Tensor, places: list[Tensor], pools: list[Tensor]) -> Tensor:
        positions, slots, lens = places
        written: list[Any] = [qkv, self.cos, self.sin, positions, slots, *pools, None, None, 1e-6]
        rows: list[Any] = [self.tables, self.starts, lens, self.dim**-0.5]
        limits: dict[str, Any] = {"max_queries": self.queries, "max_context": self.most, "workspace": self.workspace}
        if self.joined:
            return cuda.attend_joined(*written, *rows, **limits)
        given: list[Any] = [cuda.rotary_write(*written), *pools, *rows]
        if self.waits:
            settle_nothing(qkv)
        attended = cuda.paged_attention(*given, queries_are_new=True, **limits)
        if self.waits:
            settle_nothing(qkv)
        again = cuda.paged_attention(*given, **limits)  # behind one that has settled what was written
        return torch.where(attended.isnan() | (attended != again), torch.full_like(again, torch.inf), again)

    def in_a_graph(self, after_embedding: Callable[[Tensor], None] = _nothing) -> tuple[list[Tensor], list[Tensor]]:
        """What is said and what lies in the pools, in the second of two replays."""
        pools = [pool.clone() for pool in self.pools]
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self.run(pools, after_embedding)
        beside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            said = self.run(pools, after_embedding)
        for _ in range(2):
            for pool, before in zip(pools, self.pools, strict=True):
                pool.copy_(before)
            graph.replay()
        torch.cuda.synchronize()
        return said, pools


def assert_is_as_without(text: Text) -> None:
    """What is said and written is what comes where nobody reads ahead."""
    expected = text.in_a_graph(settle_nothing)
    for _ in range(3):
        said, pools = text.in_a_graph()
        assert all(bool(x.isfinite().all()) for x in said)
        assert_same(said, expected[0])
        assert_same(pools, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "heads", "width"), [(64, 3, 576), (128, 8, 4096)])
@pytest.mark.parametrize("rows", [1, 5, 8, 20, 32, 64])
@pytest.mark.parametrize("context", [3, 500, 1100])
def test_every_step_sees_what_the_steps_before_it_wrote(
    rows: int, context: int, dim: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    text = Text(rows, context, dim, heads, width, dtype)
    assert_is_as_without(text)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_pages_that_were_written_since_are_waited_for(rows: int) -> None:
    text = Text(rows, 300, 128, 4, 1024, torch.bfloat16, embeds=False)
    assert_is_as_without(text)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "heads", "width"), [(64, 3, 576), (128, 8, 4096)])
@pytest.mark.parametrize(("rows", "queries"), [(6, 3), (24, 3), (20, 8), (40, 9)])
@pytest.mark.parametrize("context", [20, 496, 1000, 5000])
def test_many_lanes_see_what_the_launch_before_them_and_the_steps_before_that_wrote(
    rows: int, queries: int, context: int, dim: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    """Rows whose new tokens begin a chunk, end one, or lie in two; and a second look at the same pages."""
    text = Text(rows, context, dim, heads, width, dtype, queries=queries, joined=False)
    assert_is_as_without(text)


def test_it_is_the_same_without_a_graph() -> None:
    text = Text(8, 300, 128, 2, 512, torch.bfloat16)
    pools = [[pool.clone() for pool in text.pools] for _ in range(2)]
    expected = text.run(pools[0], settle_nothing)
    assert_same(text.run(pools[1]), expected)
    assert_same(pools[1], pools[0])


@pytest.mark.sanitizer
def test_a_few_steps_that_read_ahead_are_clean() -> None:
    text = Text(3, 40, 64, 2, 128, torch.bfloat16)
    assert all(bool(said.isfinite().all()) for said in text.run(text.pools))
