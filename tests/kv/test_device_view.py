"""The view for GPUs against the plain one; here on the CPU, where it attends row by row."""

from __future__ import annotations

import pytest
import torch

from tests.kv.view_cases import SHAPES, ViewCase
from tide_core.kernels import reference_kernels
from tide_core.kv.cache import GatheredView, KVLayout, PagedKV, PagedView, RowSpan
from tide_core.kv.device_view import DeviceView, flash_takes, view_kind


@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_it_writes_and_attends_like_the_plain_view(rows: list[tuple[int, int]]) -> None:
    case = ViewCase(rows)
    for got, expected in zip(case.through(DeviceView), case.through(PagedView), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [PagedView, DeviceView])
def test_positions_and_slots_are_those_of_the_tokens_now(kind: type[PagedView]) -> None:
    cache = PagedKV([KVLayout(1, 8, 8)], 4, 4, torch.float32, torch.device("cpu"))
    view = kind(cache, reference_kernels(), [RowSpan([2, 0], 3, 2), RowSpan([1], 0, 1)])
    assert view.positions.tolist() == [3, 4, 0]
    assert view.slots.tolist() == [11, 0, 4]


def test_pools_on_the_cpu_are_seen_through_the_plain_view() -> None:
    cache = PagedKV([KVLayout(1, 8, 8)], 1, 4, torch.float32, torch.device("cpu"))
    assert view_kind(cache, gathers_kv=False) is PagedView
    assert view_kind(cache, gathers_kv=True) is GatheredView


def test_flash_attention_is_asked_only_for_what_it_knows() -> None:
    pool = torch.empty(1, 1, 4, 64)
    assert not flash_takes(pool, pool)
    assert not flash_takes(pool.bfloat16(), pool.bfloat16())  # not on a GPU
