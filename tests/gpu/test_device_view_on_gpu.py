"""The view for GPUs against the plain one, where it launches flash attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.kernel_cases import assert_near
from tests.kv.view_cases import SHAPES, ViewCase
from tide_core.kv.cache import PagedView
from tide_core.kv.device_view import DeviceView

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_it_writes_and_attends_like_the_plain_view(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = ViewCase(rows, dtype, "cuda")
    (got, keys), (expected, same_keys) = case.through(DeviceView), case.through(PagedView)
    assert_near(got, expected)
    torch.testing.assert_close(keys, same_keys, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("changed", [{"window": 6}, {"softcap": 5.0}, {"head_size": 12}], ids=str)
def test_windows_caps_and_odd_head_sizes_are_right_too(changed: dict[str, int]) -> None:
    case = replace(ViewCase(SHAPES[3], torch.bfloat16, "cuda"), **changed)
    assert_near(case.through(DeviceView)[0], case.through(PagedView)[0])


def test_nothing_in_a_layer_waits_for_the_device() -> None:
    case = ViewCase(SHAPES[3], torch.bfloat16, "cuda")
    case.through(DeviceView)
    with pytest.raises(RuntimeError, match="synchron"):
        _without_waiting(PagedView)
    _without_waiting(DeviceView)


def _without_waiting(kind: type[PagedView]) -> None:
    from tide_core.kernels import reference_kernels
    from tide_core.kv.cache import KVLayout, PagedKV, RowSpan

    cache = PagedKV([KVLayout(2, 16, 16)], 8, 4, torch.bfloat16, torch.device("cuda"))
    view = kind(cache, reference_kernels(), [RowSpan([3, 1], 5, 1), RowSpan([0], 0, 2)])
    new = torch.randn(3, 2, 16, dtype=torch.bfloat16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        view.write(0, new, new)
        view.attend_paged(0, torch.cat((new, new), 1), 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
