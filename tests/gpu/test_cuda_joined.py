"""Attention in one launch with what comes before it, on the GPU: the bits of the two ops, in any company."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import DEVICE, assert_same, randn
from tests.kernels.kernel_cases import assert_near
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.reference import ops as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
GUARD = 77.0
HALF_WIDTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
CONTEXTS, QUERIES = [1, 8, 33, 130, 513, 600, 1030], [1, 3, 1, 8, 2, 5, 8]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _a_device_that_joins() -> None:
    pool = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=DEVICE)
    if not cuda.supports_joined(pool, pool):
        pytest.skip("this GPU has no joined attention")


def integers(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclasses.dataclass
class Pass:
    """Rows of a few new tokens each; `filled_up` rows and as many tokens belong to nobody."""

    contexts: list[int]
    queries: list[int]
    dtype: torch.dtype
    dim: int = 64
    heads: int = 2
    group: int = 4
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    normed: bool = False
    by_position: bool = True
    filled_up: int = 0

    def __post_init__(self) -> None:
        self.owned, rows = sum(self.queries), len(self.contexts) + self.filled_up
        tokens = self.owned + self.filled_up
        per_row = -(-max(self.contexts) // self.block_size)
        self.tables = torch.randperm(rows * per_row, device=DEVICE).int().view(rows, per_row)
        places = [
            (row, position)
            for row, (context, queries) in enumerate(zip(self.contexts, self.queries, strict=True))
            for position in range(context - queries, context)
        ]
        slots = [
            int(self.tables[row, at // self.block_size]) * self.block_size + at % self.block_size for row, at in places
        ]
        nobody = [-1] * self.filled_up
        self.slots = integers(slots + nobody, torch.int64)
        self.positions = integers([at for _, at in places] + [0] * self.filled_up, torch.int64)
        starts = torch.tensor([0, *self.queries]).cumsum(0).tolist()
        self.starts = integers(starts + [self.owned] * self.filled_up)
        self.lens = integers(self.contexts + [0] * self.filled_up)
        self.qkv = randn(tokens, (self.group + 2) * self.heads * self.dim, dtype=self.dtype)
        rows_of_tables = max(self.contexts) if self.by_position else tokens
        self.cos, self.sin = (randn(rows_of_tables, self.dim, dtype=self.dtype) for _ in range(2))
        self.norms: list[Tensor | None] = [randn(self.dim, dtype=self.dtype) if self.normed else None for _ in range(2)]
        shape = (rows * per_row, self.heads, self.block_size, self.dim)
        self.first_pools = [randn(*shape, dtype=self.dtype) for _ in range(2)]

    def projected(self, pools: list[Tensor]) -> list[Any]:
        positions = self.positions if self.by_position else None
        return [self.qkv, self.cos, self.sin, positions, self.slots, *pools, *self.norms, 1e-6]

    def attended(self) -> list[Any]:
        return [self.tables, self.starts, self.lens, self.dim**-0.5, self.window, self.softcap]

    def joined(self, **more: Any) -> list[Tensor]:
        """What is attended for the tokens that rows own, and the pools afterwards."""
        pools = [one.clone() for one in self.first_pools]
        counts = {"max_queries": max(self.queries), "max_context": max(self.contexts)}
        result = cuda.attend_joined(*self.projected(pools), *self.attended(), **counts, **more)
        return [result[: self.owned], *pools]

    def in_two(self, ops: Any = cuda) -> list[Tensor]:
        pools = [one.clone() for one in self.first_pools]
        q = ops.rotary_write(*self.projected(pools))
        return [ops.paged_attention(q, *pools, *self.attended())[: self.owned], *pools]


@HALF_WIDTH
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("without", [0, 1])
def test_queries_may_be_normed_without_keys_and_keys_without_queries(
    dtype: torch.dtype, dim: int, without: int
) -> None:
    case = Pass(CONTEXTS, QUERIES, dtype, dim=dim, normed=True)
    case.norms[without] = None
    assert_same(case.joined(), case.in_two())


@HALF_WIDTH
@pytest.mark.parametrize("dim", [64, 128])
def test_tokens_behind_the_first_32_are_no_others(dtype: torch.dtype, dim: int) -> None:
    case = Pass(CONTEXTS * 3, QUERIES * 3, dtype, dim=dim)
    assert_same(case.joined(), case.in_two())


@pytest.mark.sanitizer
@HALF_WIDTH
def test_a_small_joined_pass_is_clean(dtype: torch.dtype) -> None:
    case = Pass([1, 20, 530], [1, 3, 2], dtype, filled_up=2)
    assert_same(case.joined(), case.in_two())


@HALF_WIDTH
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "group"), [(2, 1), (3, 3), (8, 4), (1, 20)])
@pytest.mark.parametrize("normed", [False, True])
def test_one_launch_gives_the_bits_of_two(dtype: torch.dtype, dim: int, heads: int, group: int, normed: bool) -> None:
    for queries in (QUERIES, [1] * len(CONTEXTS)):
        case = Pass(CONTEXTS, queries, dtype, dim=dim, heads=heads, group=group, normed=normed)
        assert_same(case.joined(), case.in_two())


@HALF_WIDTH
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (17, 0.0), (300, 5.0)])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("by_position", [False, True])
def test_windows_caps_blocks_and_rows_of_tables_are_those_of_the_two_ops(
    dtype: torch.dtype, window: int, softcap: float, block_size: int, by_position: bool
) -> None:
    case = Pass(
        CONTEXTS, QUERIES, dtype, window=window, softcap=softcap, block_size=block_size, by_position=by_position
    )
    assert_same(case.joined(), case.in_two())


@HALF_WIDTH
def test_the_joined_op_gives_what_its_reference_gives(dtype: torch.dtype) -> None:
    case = Pass(CONTEXTS, QUERIES, dtype, normed=True)
    for one, other in zip(case.joined(), case.in_two(reference), strict=True):
        assert_near(one, other)


@HALF_WIDTH
def test_tokens_that_no_row_owns_change_nothing_and_write_nothing(dtype: torch.dtype) -> None:
    case = Pass(CONTEXTS, QUERIES, dtype, filled_up=5)
    expected = case.in_two()
    case.qkv[case.owned :] = float("nan")
    out = torch.full((len(case.qkv), 8, 64), GUARD, dtype=dtype, device=DEVICE)
    assert_same(case.joined(out=out), expected)
    assert (out[case.owned :] == GUARD).all()


@HALF_WIDTH
def test_a_row_is_the_same_alone_and_joined_with_others(dtype: torch.dtype) -> None:
    case = Pass(CONTEXTS, QUERIES, dtype)
    batch = case.joined()[0]
    for row, (context, queries) in enumerate(zip(CONTEXTS, QUERIES, strict=True)):
        first = sum(QUERIES[:row])
        tokens = slice(first, first + queries)
        alone = dataclasses.replace(case, contexts=[context], queries=[queries])
        alone.first_pools, alone.cos, alone.sin = case.first_pools, case.cos, case.sin
        alone.qkv, alone.positions, alone.slots = case.qkv[tokens], case.positions[tokens], case.slots[tokens]
        alone.tables = case.tables[row : row + 1].contiguous()
        assert_same(alone.joined()[:1], [batch[tokens]])


@HALF_WIDTH
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
def test_a_query_has_the_same_bits_however_lanes_are_divided(dtype: torch.dtype, rows: int, queries: int) -> None:
    """Few rows are cut into pieces of few lanes, many into pieces of many."""
    case = Pass([520] * rows, [queries] * rows, dtype, dim=128, heads=8)
    expected = case.in_two()
    assert_same(case.joined(), expected)
    pools = [one.clone() for one in case.first_pools]
    q = cuda.rotary_write(*case.projected(pools))
    for row in (0, rows - 1):
        token = slice((row + 1) * queries - 1, (row + 1) * queries)
        alone: list[Any] = [q[token], *pools, case.tables[row : row + 1], integers([0, 1]), integers([520]), 128**-0.5]
        assert_same([cuda.paged_attention(*alone)], [expected[0][token]])


def test_a_token_that_is_written_nowhere_sees_what_its_page_holds() -> None:
    case = Pass([40, 30], [1, 2], torch.bfloat16)
    case.slots[0], case.slots[2] = -1, 10**6
    assert_same(case.joined(), case.in_two())


def test_passes_of_any_size_take_turns_with_one_workspace() -> None:
    device = torch.device(DEVICE, 0)
    held = cuda.attention_workspace(40, 8, 64, 2048, device)
    for contexts, queries in ((CONTEXTS, QUERIES), ([530], [3]), ([2048, 700], [1, 1]), (CONTEXTS, QUERIES)):
        case = Pass(contexts, queries, torch.float16)
        again = cuda.attention_workspace(sum(queries), 8, 64, max(contexts), device, held=held)
        assert again is held
        assert_same(case.joined(workspace=held), case.in_two())
