"""Attention that reads pages before the kernels of its pass have ended, on the GPU: the bits of one that waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import DEVICE, assert_same, randn
from tide_core.kernels import cuda, cuda_obstacle
from tide_core.kernels.cuda_attention import attention_workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_obstacle() is not None, reason=str(cuda_obstacle())),
]
GROUP, BLOCK, LAYERS, STEPS = 4, 16, 3, 12
VOCABULARY = 50


@pytest.fixture(autouse=True)
def _a_device_that_joins() -> None:
    torch.manual_seed(0)
    pool = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=DEVICE)
    if not cuda.takes_joined(pool, pool):
        pytest.skip("this GPU has no joined attention")


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

    def __post_init__(self) -> None:
        blocks = -(-(self.context + STEPS) // BLOCK)
        self.tables = torch.randperm(self.rows * blocks, device=DEVICE).int().view(self.rows, blocks)
        shape = self.rows * blocks, self.heads, BLOCK, self.dim
        self.pools = [randn(*shape, dtype=self.dtype) for _ in range(2 * LAYERS)]
        self.starts = torch.arange(self.rows + 1, dtype=torch.int32, device=DEVICE)
        inner = self.heads * GROUP * self.dim
        self.qkv = randn((GROUP + 2) * self.heads * self.dim, self.width, dtype=self.dtype) / self.width**0.5
        self.out = randn(self.width, inner, dtype=self.dtype) / inner**0.5
        self.cos, self.sin = (randn(self.context + STEPS, self.dim, dtype=self.dtype) for _ in range(2))
        self.embedding = randn(VOCABULARY, self.width, dtype=self.dtype)
        sizes = self.rows, self.heads * GROUP, self.dim, self.context + STEPS
        self.workspace = attention_workspace(*sizes, torch.device(DEVICE))  # none is made in between
        row = torch.arange(self.rows, device=DEVICE)
        self.places = []
        for step in range(STEPS):
            at = self.context + step
            slots = self.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK
            lens = torch.full_like(self.starts[1:], at + 1)
            self.places.append(((7 * row + step) % VOCABULARY, torch.full_like(slots, at), slots, lens))

    def run(self, pools: list[Tensor], after_embedding: Callable[[Tensor], None] = lambda x: None) -> list[Tensor]:
        said: list[Tensor] = []
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
        given: list[Any] = [qkv, self.cos, self.sin, positions, slots, *pools, None, None, 1e-6]
        given += [self.tables, self.starts, lens, self.dim**-0.5]
        limits: dict[str, Any] = {"max_queries": 1, "max_context": self.context + STEPS, "workspace": self.workspace}
        return cuda.attend_joined(*given, **limits)

    def in_a_graph(
        self, after_embedding: Callable[[Tensor], None] = lambda x: None
    ) -> tuple[list[Tensor], list[Tensor]]:
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "heads", "width"), [(64, 3, 576), (128, 8, 4096)])
@pytest.mark.parametrize("rows", [1, 5, 8, 20, 32, 64])
@pytest.mark.parametrize("context", [3, 500, 1100])
def test_every_step_sees_what_the_steps_before_it_wrote(
    rows: int, context: int, dim: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    text = Text(rows, context, dim, heads, width, dtype)
    expected = text.in_a_graph(settle_nothing)
    for _ in range(3):
        said, pools = text.in_a_graph()
        assert all(bool(x.isfinite().all()) for x in said)
        assert_same(said, expected[0])
        assert_same(pools, expected[1])


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_pages_that_were_written_since_are_waited_for(rows: int) -> None:
    text = Text(rows, 300, 128, 4, 1024, torch.bfloat16, embeds=False)
    expected = text.in_a_graph(settle_nothing)
    for _ in range(3):
        said, pools = text.in_a_graph()
        assert_same(said, expected[0])
        assert_same(pools, expected[1])


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
