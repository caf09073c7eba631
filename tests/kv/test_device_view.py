"""The view for GPUs against the plain one; here on the CPU, where it attends row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.twin import twin_kernels
from tests.kv.view_cases import SHAPES, ViewCase
from tide_core.batch import Rotation
from tide_core.kernels import reference_kernels
from tide_core.kv.cache import GatheredView, KVLayout, PagedKV, PagedView, RowSpan, StepIndex
from tide_core.kv.device_view import DeviceView, flash_supports
from tide_core.kv.kernel_view import IndexLayout, KernelView, view_kind


@pytest.mark.parametrize("kind", [DeviceView, KernelView])
@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_it_writes_and_attends_like_the_plain_view(rows: list[tuple[int, int]], kind: type[PagedView]) -> None:
    case = replace(ViewCase(rows), kernels=twin_kernels())
    for got, expected in zip(case.through(kind), case.through(PagedView), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [PagedView, DeviceView, KernelView])
def test_positions_and_slots_are_those_of_the_tokens_now(kind: type[PagedView]) -> None:
    cache = PagedKV([KVLayout(1, 8, 8)], 4, 4, torch.float32, torch.device("cpu"))
    view = kind(cache, twin_kernels(), [RowSpan([2, 0], 3, 2), RowSpan([1], 0, 1)])
    assert view.positions.tolist() == [3, 4, 0]
    assert view.slots.tolist() == [11, 0, 4]


def test_pools_on_the_cpu_are_seen_through_the_plain_view() -> None:
    cache = PagedKV([KVLayout(1, 8, 8)], 1, 4, torch.float32, torch.device("cpu"))
    assert view_kind(cache, reference_kernels(), gathers_kv=False) is PagedView
    assert view_kind(cache, reference_kernels(), gathers_kv=True) is GatheredView


def test_pages_are_read_in_place_where_the_kernels_can() -> None:
    equal, unequal = (PagedKV([KVLayout(1, 8, size)], 1, 4, torch.float32, torch.device("cpu")) for size in (8, 16))
    assert view_kind(equal, twin_kernels(), gathers_kv=False) is KernelView
    assert view_kind(unequal, twin_kernels(), gathers_kv=False) is PagedView
    assert view_kind(equal, twin_kernels(), gathers_kv=True) is GatheredView


def test_indices_in_a_buffer_that_is_too_large_are_the_same_and_the_rest_belongs_to_no_row() -> None:
    index = StepIndex.build([RowSpan([2, 0], 3, 2), RowSpan([1], 0, 1)], 4)
    layout = IndexLayout(tokens=8, rows=4, blocks=3, columns=2)
    host = np.full(layout.size, 77, dtype=np.int32)
    layout.fill(host, index, [(np.array([5, 6, 7]), 0), (np.array([1, 2, 3]), -1)])
    tokens, kept, positions, slots, starts, lens, tables = layout.split(torch.from_numpy(host))
    assert tokens.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert kept.tolist() == [1, 2, 3, -1, -1, -1, -1, -1]
    assert positions.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert slots.tolist() == [11, 0, 4, -1, -1, -1, -1, -1]
    assert starts.tolist() == [0, 2, 3, 3, 3]
    assert lens.tolist() == [5, 1, 0, 0]
    assert tables[:2, :2].tolist() == [[2, 0], [1, 0]]


def test_flash_attention_is_asked_only_for_what_it_knows() -> None:
    pool = torch.empty(1, 1, 4, 64)
    assert not flash_supports(pool, pool)
    assert not flash_supports(pool.bfloat16(), pool.bfloat16())  # not on a GPU


@pytest.mark.parametrize(
    ("rows", "context", "queries", "launches"),
    [(32, 1024, 4, 1), (8, 4096, 8, 1), (33, 1024, 2, 2), (33, 1024, 1, 1), (1, 1024, 9, 2)],
)
def test_queries_of_up_to_32_ki_positions_are_turned_and_attend_in_one_launch(
    rows: int, context: int, queries: int, launches: int
) -> None:
    asked: list[str] = []
    twin = twin_kernels()

    def counted(name: str) -> Any:
        def run(*tensors: Any, **limits: Any) -> Any:
            asked.append(name)
            return getattr(twin, name)(*tensors, **limits)

        return run

    kernels = replace(twin, **{name: counted(name) for name in ("attend_joined", "rotary_write", "attend")})
    cache = PagedKV([KVLayout(1, 8, 8)], rows, context, torch.float32, torch.device("cpu"))
    view = KernelView(cache, kernels, [RowSpan([row], 0, queries) for row in range(rows)])
    view.limit(queries, context)
    turns = Rotation(torch.ones(queries, 8), torch.zeros(queries, 8), view.positions)
    attended = view.attend_joined(0, torch.randn(rows * queries, 4 * 8), turns, (None, None), 1e-6, 0.25, 0)
    assert attended.shape == (rows * queries, 2, 8)
    assert asked == (["attend_joined"] if launches == 1 else ["rotary_write", "attend"])
