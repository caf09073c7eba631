"""Attention on the GPU: what comes before it, the pages, attention itself, and a layer of all ops in one stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import DEVICE, assert_same, empty, randn
from tests.kernels.kernel_cases import DTYPES, PagedCase, assert_near
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.reference import ops as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
GUARD = 77.0
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def count(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def slots_of(tokens: int, num_slots: int) -> Tensor:
    slots = torch.randperm(num_slots, device=DEVICE)[:tokens]
    slots[1::5] = -1
    slots[3::7] = num_slots + 5
    return slots


@dataclasses.dataclass
class Projection:
    """A joined projection and all that it is turned and written with."""

    tokens: int
    dtype: torch.dtype
    query_heads: int = 6
    heads: int = 2
    dim: int = 64
    normed: bool = False
    blocks: int = 8
    block_size: int = 16

    def __post_init__(self) -> None:
        width = (self.query_heads + 2 * self.heads) * self.dim
        self.qkv = randn(self.tokens, width, dtype=self.dtype)
        self.cos, self.sin = (randn(200, self.dim, dtype=self.dtype) for _ in range(2))
        self.positions = torch.randint(0, 200, (self.tokens,), device=DEVICE)
        self.slots = slots_of(self.tokens, self.blocks * self.block_size)
        self.norms = [randn(self.dim, dtype=self.dtype) if self.normed else None for _ in range(2)]

    def pools(self) -> tuple[Tensor, Tensor]:
        shape = (self.blocks, self.heads, self.block_size, self.dim)
        return torch.full(shape, GUARD, device=DEVICE).to(self.dtype), torch.full(shape, -GUARD, device=DEVICE).to(
            self.dtype
        )

    def run(self, op: Callable[..., Tensor], tokens: slice = slice(None), **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        pools = self.pools()
        places = self.positions[tokens], self.slots[tokens]
        if op is reference.rotary_write:
            inside = places[1].where(places[1] < self.blocks * self.block_size, -1)
            places = places[0], inside
        return op(self.qkv[tokens], self.cos, self.sin, *places, *pools, *self.norms, 1e-6, **more), *pools


@pytest.mark.sanitizer
@pytest.mark.parametrize("dim", [6, 64])
def test_a_small_turn_is_clean(dim: int) -> None:
    case = Projection(5, torch.float16, dim=dim, normed=True)
    results, expected = case.run(cuda.rotary_write), case.run(reference.rotary_write)
    for one, other in zip(results, expected, strict=True):
        assert_near(one, other)


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 128, 256, 320])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_write_gives_what_its_reference_gives(dtype: torch.dtype, dim: int, normed: bool) -> None:
    for tokens in (0, 1, 3, 33):
        case = Projection(tokens, dtype, dim=dim, normed=normed)
        results, expected = case.run(cuda.rotary_write), case.run(reference.rotary_write)
        for one, other in zip(results, expected, strict=True):
            if normed:
                assert_near(one, other)  # sums of squares have another order
            else:
                assert_same([one], [other])
        assert_same(results[2:], expected[2:])


@EVERY_DTYPE
@pytest.mark.parametrize("normed", [False, True])
def test_a_tokens_turn_is_the_same_alone_and_in_place(dtype: torch.dtype, normed: bool) -> None:
    case = Projection(20, dtype, normed=normed)
    q, k_pool, v_pool = case.run(cuda.rotary_write)
    for first, last in ((0, 1), (19, 20), (7, 12)):
        assert_same([case.run(cuda.rotary_write, slice(first, last))[0]], [q[first:last]])
    inside = case.qkv.view(20, 10, 64)[:, :6]
    rest = case.qkv[:, 6 * 64 :].clone()
    placed = case.run(cuda.rotary_write, out=inside)
    assert_same([inside, *placed[1:], case.qkv[:, 6 * 64 :]], [q, k_pool, v_pool, rest])


def test_a_position_outside_the_tables_gives_nan_and_touches_no_other_token() -> None:
    case = Projection(4, torch.bfloat16)
    expected = case.run(cuda.rotary_write)[0]
    case.positions[1], case.positions[2] = 200, -1
    q = case.run(cuda.rotary_write)[0]
    assert q[1:3].isnan().all()
    assert_same([q[0], q[3]], [expected[0], expected[3]])


@pytest.mark.sanitizer
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (7, 5)])
def test_a_small_write_is_clean(key_dim: int, value_dim: int) -> None:
    k, v = (randn(6, 3, dim, dtype=torch.bfloat16) for dim in (key_dim, value_dim))
    written = [randn(6, 3, 16, dim, dtype=torch.bfloat16) for dim in (key_dim, value_dim)]
    expected, slots = [one.clone() for one in written], torch.tensor([3, -1, 95, 40, 16, 0], device=DEVICE)
    cuda.write_kv(k, v, *written, slots)
    reference.write_kv(k, v, *expected, slots)
    assert_same(written, expected)


@EVERY_DTYPE
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (7, 5), (128, 64), (20, 1)])
def test_pages_are_written_where_the_slots_say(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    for tokens in (0, 1, 40):
        # As Hugging Face hands them over: [1, heads, T, D], whose transpose has free strides on T and heads.
        k = randn(3, tokens, key_dim, dtype=dtype).transpose(0, 1)
        v = randn(3, tokens, value_dim, dtype=dtype).transpose(0, 1)
        slots = slots_of(tokens, 96)
        pools = randn(6, 3, 16, key_dim, dtype=dtype), randn(6, 3, 16, value_dim, dtype=dtype)
        written, expected = [one.clone() for one in pools], [one.clone() for one in pools]
        cuda.write_kv(k, v, written[0], written[1], slots)
        reference.write_kv(k, v, expected[0], expected[1], slots.where(slots < 96, -1))
        assert_same(written, expected)


def on_device(case: PagedCase) -> list[Any]:
    return [one.to(DEVICE) if isinstance(one, Tensor) else one for one in case.arguments()]


def attend(case: PagedCase, **more: Any) -> Tensor:
    return cuda.paged_attention(*on_device(case), **more)


def attend_plainly(case: PagedCase) -> Tensor:
    """In float32, on the CPU: the pages hold NaN wherever nothing may be read."""
    wide = [one.float() if isinstance(one, Tensor) and one.is_floating_point() else one for one in case.arguments()]
    return reference.paged_attention(*wide).to(DEVICE, case.dtype)


CONTEXTS, QUERIES = [1, 20, 33, 130, 513, 600], [1, 3, 1, 5, 2, 16]


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3), (2, 4), (1, 16), (1, 20)])
def test_attention_gives_what_its_reference_gives(dtype: torch.dtype, dim: int, kv_heads: int, group: int) -> None:
    case = PagedCase(
        CONTEXTS,
        QUERIES,
        num_kv_heads=kv_heads,
        group=group,
        key_dim=dim,
        value_dim=dim,
        dtype=dtype,
        scaling=dim**-0.5,
    )
    assert_near(attend(case), attend_plainly(case))


@EVERY_DTYPE
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (17, 0.0), (300, 0.0), (0, 5.0), (200, 3.0)])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_windows_caps_and_block_sizes(dtype: torch.dtype, window: int, softcap: float, block_size: int) -> None:
    case = PagedCase(CONTEXTS, QUERIES, dtype=dtype, window=window, softcap=softcap, block_size=block_size)
    assert_near(attend(case), attend_plainly(case))


@pytest.mark.sanitizer
@EVERY_DTYPE
def test_a_small_call_of_attention_is_clean(dtype: torch.dtype) -> None:
    case = PagedCase([1, 20, 530], [1, 3, 2], dtype=dtype)
    assert_near(attend(case), attend_plainly(case))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "block_size"), [(80, 16), (96, 16), (256, 16), (64, 8)])
def test_heads_and_blocks_of_other_sizes_are_clean(dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Of the sizes above a GPU of 9.0 has kernels of its own; these take the one that all since 8.0 have."""
    sizes = {"key_dim": dim, "value_dim": dim, "block_size": block_size, "scaling": dim**-0.5}
    case = PagedCase([1, 20, 530], [1, 3, 2], dtype=dtype, **sizes)
    assert_near(attend(case), attend_plainly(case))


@EVERY_DTYPE
def test_a_row_is_the_same_alone_and_in_every_batch(dtype: torch.dtype) -> None:
    case = PagedCase(CONTEXTS, QUERIES, dtype=dtype)
    q, k_pool, v_pool, tables, starts, lengths, *rest = on_device(case)
    batch = attend(case)
    for row, context in enumerate(CONTEXTS):
        first, last = int(starts[row]), int(starts[row + 1])
        alone = count(0).repeat(2)
        alone[1] = last - first
        one = (
            q[first:last].contiguous(),
            k_pool,
            v_pool,
            tables[row : row + 1].contiguous(),
            alone,
            lengths[row : row + 1],
        )
        assert_same([cuda.paged_attention(*one, *rest)], [batch[first:last]])
        # One query at a time, as decoding does.
        for query in range(first, last):
            single = count(0).repeat(2)
            single[1] = 1
            length = count(context - (last - 1 - query))
            one = q[query : query + 1].contiguous(), k_pool, v_pool, tables[row : row + 1].contiguous(), single, length
            assert_same([cuda.paged_attention(*one, *rest, max_context=600)], [batch[query : query + 1]])


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [0, 40])
def test_many_queries_of_many_rows_are_near_the_reference_and_the_same_alone(
    dtype: torch.dtype, dim: int, window: int
) -> None:
    """More lanes than go round the multiprocessors of an H200 in pieces of eight: another kernel takes them there."""
    sizes = {"num_kv_heads": 4, "group": 4, "key_dim": dim, "value_dim": dim, "scaling": dim**-0.5}
    case = PagedCase(CONTEXTS * 3, [1, 3, 8, 5, 2, 8] * 3, dtype=dtype, window=window, **sizes)
    q, k_pool, v_pool, tables, starts, lengths, *rest = on_device(case)
    batch = attend(case)
    assert_near(batch, attend_plainly(case))
    single = count(0).repeat(2)
    single[1] = 1
    for row in range(6, 12):
        first, last = int(starts[row]), int(starts[row + 1])
        for query in range(first, last):
            one = q[query : query + 1].contiguous(), k_pool, v_pool, tables[row : row + 1].contiguous(), single
            length = count(int(lengths[row]) - (last - 1 - query))
            alone = cuda.paged_attention(*one, length, *rest, max_context=600)
            assert_same([alone], [batch[query : query + 1]])


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [8, 9])
@pytest.mark.parametrize("copies", [1, 4])
def test_many_lanes_are_clean(copies: int, queries: int, dim: int, dtype: torch.dtype) -> None:
    """At most 32 lanes a piece and more; with four copies a multiprocessor has several pieces."""
    contexts, lengths = ([20, 40] * 9 + [530]) * copies, ([5] * 18 + [queries]) * copies
    case = PagedCase(contexts, lengths, num_kv_heads=4, group=4, key_dim=dim, value_dim=dim, dtype=dtype)
    assert_near(attend(case), attend_plainly(case))


@EVERY_DTYPE
@pytest.mark.parametrize("rows", [0, 2, 6])
def test_queries_that_no_row_owns_are_neither_read_nor_written(dtype: torch.dtype, rows: int) -> None:
    case = PagedCase(CONTEXTS, QUERIES, dtype=dtype)
    whole = attend(case)
    q, k_pool, v_pool, tables, starts, lengths, *rest = on_device(case)
    owned = int(starts[rows])
    tables[rows:], lengths[rows:], starts[rows + 1 :] = 2**30, 2**30, 2**30
    q = q.contiguous()
    q[owned:] = float("nan")
    out = torch.full_like(whole, GUARD)
    indices = tables[:rows], starts[: rows + 1], lengths[:rows]
    cuda.paged_attention(q, k_pool, v_pool, *indices, *rest, max_context=600, out=out)
    assert_same([out[:owned]], [whole[:owned]])
    assert (out[owned:] == GUARD).all()


def test_there_may_be_more_than_65536_rows() -> None:
    case = PagedCase([1, 3, 9, 30], [1, 1, 1, 1], dtype=torch.bfloat16, group=1)
    q, k_pool, v_pool, tables, _, lengths, *rest = on_device(case)
    expected, repeats = attend(case), 17_500
    many = q.repeat(repeats, 1, 1), k_pool, v_pool, tables.repeat(repeats, 1)
    starts = torch.arange(4 * repeats + 1, dtype=torch.int32, device=DEVICE)
    assert_same([cuda.paged_attention(*many, starts, lengths.repeat(repeats), *rest)], [expected.repeat(repeats, 1, 1)])


@EVERY_DTYPE
def test_long_contexts_are_added_up_from_their_chunks(dtype: torch.dtype) -> None:
    """Too long for a reference in Python that copies pages one by one, so pages follow each other here."""
    heads, dim, length = 2, 128, 40_000
    k, v, q = (randn(heads, length, dim, dtype=dtype) for _ in range(3))
    blocks = length // 16
    k_pool, v_pool = (one.view(heads, blocks, 16, dim).transpose(0, 1).contiguous() for one in (k, v))
    tables = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None]
    queries = q[:, -3:].transpose(0, 1).contiguous()
    starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    result = cuda.paged_attention(queries, k_pool, v_pool, tables, starts, count(length), dim**-0.5)
    scores = torch.einsum("qhd,hkd->hqk", queries.double(), k.double()) * dim**-0.5
    future = torch.arange(length, device=DEVICE)[None] > torch.arange(length - 3, length, device=DEVICE)[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,hkd->qhd", weights, v.double()).to(dtype)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-3 if dtype is torch.bfloat16 else 4e-4)


def test_a_workspace_serves_smaller_calls_and_nothing_is_allocated_with_it() -> None:
    workspace = cuda.attention_workspace(40, 6, 64, 1024, torch.device(DEVICE, 0))
    for contexts, queries in ((CONTEXTS, QUERIES), ([530], [3]), (CONTEXTS, QUERIES)):
        case = PagedCase(contexts, queries, dtype=torch.float16)
        arguments, expected = on_device(case), attend(case)
        arguments[0] = arguments[0].contiguous()
        out = torch.empty_like(expected)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        cuda.paged_attention(*arguments, workspace=workspace, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert_same([out], [expected])


class Layers:
    """Some decoder layers over shared buffers: whatever starts too early reads or overwrites what is still in use."""

    WIDTH, HEADS, KV_HEADS, DIM, INNER, ROWS, DEPTH = 256, 4, 2, 64, 512, 3, 6

    def __init__(self, dtype: torch.dtype) -> None:
        width, dim = self.WIDTH, self.DIM
        joined = (self.HEADS + 2 * self.KV_HEADS) * dim
        sizes = ((joined, width), (width, self.HEADS * dim), (2 * self.INNER, width), (width, self.INNER))
        self.weights = [
            [randn(*size, dtype=dtype, scale=size[1] ** -0.5) for size in sizes]
            + [randn(width, dtype=dtype) for _ in range(2)]
            for _ in range(self.DEPTH)
        ]
        self.table, self.ids = randn(100, width, dtype=dtype), torch.randint(0, 100, (self.ROWS,), device=DEVICE)
        self.cos, self.sin = (randn(64, dim, dtype=dtype) for _ in range(2))
        self.context_lens = torch.tensor([9, 33, 1], dtype=torch.int32, device=DEVICE)
        self.positions = (self.context_lens - 1).long()
        self.tables = torch.arange(9, dtype=torch.int32, device=DEVICE).view(3, 3)
        self.slots = self.tables.long().gather(1, (self.positions // 16)[:, None])[:, 0] * 16 + self.positions % 16
        self.starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
        self.first_pools = [
            [randn(9, self.KV_HEADS, 16, dim, dtype=dtype) for _ in range(2)] for _ in range(self.DEPTH)
        ]
        self.pools = [[one.clone() for one in pair] for pair in self.first_pools]
        self.states, self.normed = empty(3, width, dtype=dtype), empty(3, width, dtype=dtype)
        self.joined, self.inner = empty(3, joined, dtype=dtype), empty(3, self.INNER, dtype=dtype)
        self.attended = empty(3, self.HEADS, dim, dtype=dtype)

    def reset(self) -> None:
        for pair, first in zip(self.pools, self.first_pools, strict=True):
            for one, other in zip(pair, first, strict=True):
                one.copy_(other)

    def run(self, after_each: Callable[[], None]) -> None:
        q = self.joined.view(3, -1, self.DIM)[:, : self.HEADS]
        places = self.positions, self.slots
        cuda.embed(self.ids, self.table, out=self.states)
        after_each()
        for (qkv, o, gate_up, down, norm, inner_norm), pools in zip(self.weights, self.pools, strict=True):
            steps: list[Callable[[], object]] = [
                lambda norm=norm: cuda.rms_norm(self.states, norm, 1e-5, out=self.normed),
                lambda qkv=qkv: cuda.linear(self.normed, qkv, out=self.joined),
                lambda pools=pools: cuda.rotary_write(self.joined, self.cos, self.sin, *places, *pools, out=q),
                lambda pools=pools: cuda.paged_attention(
                    q, *pools, self.tables, self.starts, self.context_lens, 0.125, out=self.attended
                ),
                lambda o=o: cuda.linear(self.attended.flatten(1), o, residual=self.states, out=self.states),
                lambda norm=inner_norm: cuda.rms_norm(self.states, norm, 1e-5, out=self.normed),
                lambda both=gate_up: cuda.linear(self.normed, both, gated=True, out=self.inner),
                lambda down=down: cuda.linear(self.inner, down, residual=self.states, out=self.states),
            ]
            for step in steps:
                step()
                after_each()


@EVERY_DTYPE
def test_ops_that_follow_each_other_wait_for_each_other(dtype: torch.dtype) -> None:
    layers = Layers(dtype)
    layers.run(torch.cuda.synchronize)
    expected = layers.states.clone()
    assert expected.isfinite().all()
    for _ in range(20):
        layers.reset()
        layers.run(lambda: None)
        assert_same([layers.states], [expected])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run(lambda: None)
    for _ in range(20):
        layers.reset()
        layers.states.fill_(GUARD)
        graph.replay()
        assert_same([layers.states], [expected])
