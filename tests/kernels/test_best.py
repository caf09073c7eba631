"""The largest number of each row: native against Torch, and what both promise."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

from tide_core.kernels import select
from tide_core.kernels.cpu.best import _native_best, best

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["native", "torch"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setitem(sys.modules, "tide_core.kernels._native", None)
    for cached in (select._import_error, _native_best):
        cached.cache_clear()
    assert (_native_best() is None) == (request.param == "torch")
    yield request.param
    for cached in (select._import_error, _native_best):
        cached.cache_clear()


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("width", [1, 2, 3, 15, 384, 2047, 2048, 2049, 49152])
def test_every_maximum_is_found_where_it_first_stands(num_rows: int, width: int) -> None:
    rows = torch.randint(-40, 40, (num_rows, width)).float()
    maxima, indices = best(rows)
    assert maxima == [max(row) for row in rows.tolist()]
    assert indices == [row.index(max(row)) for row in rows.tolist()]


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("row", "maximum", "index"),
    [
        ([1.0, 3.0, 3.0], 3.0, 1),
        ([-0.0, 0.0], 0.0, 0),
        ([0.0, INF, 2.0, INF], INF, 1),
        ([-INF, -INF], -INF, 0),
        ([-INF, -5.0, -INF], -5.0, 1),
        ([INF, NAN, 1.0, NAN], NAN, 1),
    ],
)
@pytest.mark.parametrize("padding", [0, 3, 5000])
def test_equal_infinite_and_missing_numbers(row: list[float], maximum: float, index: int, padding: int) -> None:
    rows = torch.tensor([[-INF] * padding + row, [0.5] * (padding + len(row))])
    if row == [-INF, -INF]:
        index = -padding
    maxima, indices = best(rows)
    assert maxima[0] == pytest.approx(maximum, nan_ok=True)
    assert (indices[0], maxima[1], indices[1]) == (padding + index, 0.5, 0)


@pytest.mark.parametrize("at", [0, 3, 2048, 4095, 4099])
@pytest.mark.parametrize("value", [7.0, INF, NAN])
def test_no_place_in_a_row_is_overlooked(at: int, value: float) -> None:
    rows = torch.zeros(3, 4100)
    rows[1, at] = value
    maxima, indices = best(rows)
    assert maxima == pytest.approx([0.0, value, 0.0], nan_ok=True)
    assert indices == [0, at, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_rows_with_gaps_are_taken_too(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 100).to(dtype)
    assert best(rows) == (rows.max(-1).values.tolist(), rows.max(-1).indices.tolist())
    wide = torch.randn(4, 200)[:, ::2]
    assert best(wide) == (wide.max(-1).values.tolist(), wide.max(-1).indices.tolist())


def test_neither_mates_nor_threads_change_a_result() -> None:
    rows = torch.randn(40, 6001)
    alone = [best(row.unsqueeze(0)) for row in rows]
    for threads in (1, 2, 5):
        _native.set_num_threads(threads)
        maxima, indices = best(rows)
        assert [([value], [index]) for value, index in zip(maxima, indices, strict=True)] == alone
