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


def publish_nothing(x: Tensor) -> None:
    """A launch that may write pages, as far as is known: nothing after it reads early."""
    cuda.scatter_rows(x[:1], torch.full((1,), -1, device=DEVICE), torch.empty_like(x))


@dataclasses.dataclass
class Text:
    """Rows of STEPS tokens; each token passes some layers, whose pages the later steps read."""

    rows: int
    context: int
    dim: int
    heads: int
    width: int
    dtype: torch.dtype
    embeds: bool = True
    """Whether every step begins with a look-up, which publishes what was written before; else only the first."""
    queries: int = 1
    """Tokens of a row in a step."""
    joined: bool = True
    """Whether keys and values are written by the launch that attends, or by one before it."""
    waits: bool = False
    """Whether nothing reads early."""

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
        outputs: list[Tensor] = []
        self.waits = after_embedding is not _nothing
        for token_ids, *places in self.places:
            if self.embeds or not outputs:
                x = first = cuda.embed(token_ids, self.embedding)
                after_embedding(x)
            for layer in range(LAYERS):
                qkv = cuda.linear(x, self.qkv)
                attended = self.attend(qkv, places, pools[2 * layer : 2 * layer + 2])
                x = cuda.linear(attended.flatten(1), self.out, residual=first)
            outputs.append(x)
        return outputs

    def attend(self, qkv: Tensor, places: list[Tensor], pools: list[Tensor]) -> Tensor:
        positions, slots, lens = places
        written: list[Any] = [qkv, self.cos, self.sin, positions, slots, *pools, None, None, 1e-6]
        rows: list[Any] = [self.tables, self.starts, lens, self.dim**-0.5]
        limits: dict[str, Any] = {"max_queries": self.queries, "max_context": self.most, "workspace": self.workspace}
        if self.joined:
            return cuda.attend_joined(*written, *rows, **limits)
        given: list[Any] = [cuda.rotary_write(*written), *pools, *rows]
        if self.waits:
            publish_nothing(qkv)
        attended = cuda.paged_attention(*given, queries_are_new=True, **limits)
        if self.waits:
            publish_nothing(qkv)
        again = cuda.paged_attention(*given, **limits)  # after one that has published what was written
        return torch.where(attended.isnan() | (attended != again), torch.full_like(again, torch.inf), again)

    def in_a_graph(self, after_embedding: Callable[[Tensor], None] = _nothing) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs and what lies in the pools, in the second of two replays."""
        pools = [pool.clone() for pool in self.pools]
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self.run(pools, after_embedding)
        side_stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.run(pools, after_embedding)
        for _ in range(2):
            for pool, before in zip(pools, self.pools, strict=True):
                pool.copy_(before)
            graph.replay()
        torch.cuda.synchronize()
        return outputs, pools


def assert_is_as_without(text: Text) -> None:
    """Outputs and pages are those of launches that do not read early."""
    expected = text.in_a_graph(publish_nothing)
    for _ in range(3):
        outputs, pools = text.in_a_graph()
        assert all(bool(x.isfinite().all()) for x in outputs)
        assert_same(outputs, expected[0])
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


def test_indices_that_torch_wrote_right_before_are_seen() -> None:
    text = Text(8, 300, 128, 4, 1024, torch.bfloat16)
    token_ids, *places = text.places[0]
    right, wrong = text.tables.clone(), text.tables.roll(1, 0)
    qkv = cuda.linear(cuda.embed(token_ids, text.embedding), text.qkv)
    expected = text.attend(qkv, places, [pool.clone() for pool in text.pools[:2]])
    pools = [pool.clone() for pool in text.pools[:2]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.embed(token_ids, text.embedding)  # publishes what was before it
        text.tables.copy_(right)
        attended = text.attend(qkv, places, pools)
    for _ in range(20):
        text.tables.copy_(wrong)
        graph.replay()
        assert_same([attended], [expected])


def test_it_is_the_same_without_a_graph() -> None:
    text = Text(8, 300, 128, 2, 512, torch.bfloat16)
    pools = [[pool.clone() for pool in text.pools] for _ in range(2)]
    expected = text.run(pools[0], publish_nothing)
    assert_same(text.run(pools[1]), expected)
    assert_same(pools[1], pools[0])


@pytest.mark.sanitizer
def test_a_few_steps_that_read_ahead_are_clean() -> None:
    text = Text(3, 40, 64, 2, 128, torch.bfloat16)
    assert all(bool(outputs.isfinite().all()) for outputs in text.run(text.pools))
