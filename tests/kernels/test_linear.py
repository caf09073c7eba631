from __future__ import annotations

import importlib

import pytest
import torch

from tests.kernels.kernel_cases import DTYPES, assert_near, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")

SHAPES = [(576, 96), (64, 1), (1, 8), (7, 5), (33, 17), (130, 3), (1536, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_native_linear_matches_the_reference(
    dtype: torch.dtype, rows: int, in_features: int, out_features: int
) -> None:
    x = torch.randn(rows, in_features).to(dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    for added in (None, bias):
        wide = None if added is None else added.float()
        expected = reference.linear(x.float(), weight.float(), wide).to(dtype)
        assert_near(native.linear(x, weight, added), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_bitwise_the_same_alone_and_at_any_place_in_any_batch(dtype: torch.dtype) -> None:
    x = torch.randn(150, 579).to(dtype)
    weight = torch.randn(101, 579).to(dtype)
    bias = torch.randn(101).to(dtype)
    alone = torch.stack([native.linear(row, weight, bias) for row in x])
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 64, 150):
        assert_same_bits(native.linear(x[:rows], weight, bias), alone[:rows])
        assert_same_bits(native.linear(x[-rows:], weight, bias), alone[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 37])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 640).to(dtype)
    weight = torch.randn(2051, 640).to(dtype)
    _native.set_num_threads(1)
    expected = native.linear(x, weight)
    for threads in (2, 3, 5):
        _native.set_num_threads(threads)
        for _ in range(5):
            assert_same_bits(native.linear(x, weight), expected)


def test_leading_dimensions_are_kept() -> None:
    weight = torch.randn(6, 8)
    for shape in [(8,), (3, 8), (2, 3, 8), (2, 3, 2, 8), (2, 0, 8)]:
        x = torch.randn(shape)
        y = native.linear(x, weight)
        assert y.shape == (*shape[:-1], 6)
        assert_near(y, reference.linear(x, weight))


def test_rows_with_gaps_between_them_are_read_right() -> None:
    x = torch.randn(5, 20)[:, 4:12]
    weight = torch.randn(6, 8)
    assert_near(native.linear(x, weight), reference.linear(x, weight))


def test_nan_and_infinity_reach_only_their_own_row() -> None:
    x = torch.randn(6, 64)
    x[1, 3] = float("nan")
    x[4, 5] = float("inf")
    y = native.linear(x, torch.rand(10, 64) + 0.1)
    assert y[1].isnan().all()
    assert y[4].isinf().all()
    assert y[[0, 2, 3, 5]].isfinite().all()


def test_no_memory_behind_the_tensors_is_used() -> None:
    padded = torch.full((4, 16), float("nan"))
    x = padded.flatten()[:9].view(1, 9).copy_(torch.ones(1, 9))
    weight = torch.full((40,), float("nan"))[: 3 * 9].view(3, 9).copy_(torch.ones(3, 9))
    assert_same_bits(native.linear(x, weight), torch.full((1, 3), 9.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_a_narrow_type_is_read_and_written_as_torch_does(dtype: torch.dtype) -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    atol = 0.0
    if dtype is torch.bfloat16 and _native.instruction_set() == "amx":  # there subnormal numbers are zero
        atol = torch.finfo(dtype).tiny
        numbers = torch.where(numbers.abs() < atol, 0.0, numbers)
    one = torch.ones(1, 1, dtype=dtype)
    torch.testing.assert_close(native.linear(one, numbers.view(-1, 1))[0], numbers, rtol=0, atol=0, equal_nan=True)
    factors = torch.randn(64, 1).to(dtype)
    products = native.linear(factors, numbers.view(-1, 1))
    expected = (factors.float() * numbers.float()).to(dtype)
    torch.testing.assert_close(products, expected, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(7, 5), (64, 48), (33, 130)])
def test_a_bfloat16_weight_beside_float32_states_is_the_widened_weight(
    rows: int, out_features: int, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    bias = torch.randn(out_features, generator=generator)
    assert torch.equal(native.linear(x, weight, bias), native.linear(x, weight.float(), bias))
    torch.testing.assert_close(native.linear(x, weight, bias), reference.linear(x, weight, bias))
