"""The linear for few rows and the one for many give a row the same bits, whatever its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import RowOp, assert_right, assert_same, linear, randn
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.cuda.launch import fast_for_many_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
HALF_WIDTHS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
MOST = 1024
COUNTS = (1, 2, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 192, 200, 256, 257, 500, MOST)
SHAPES = {
    "4096 of 4096, residual": (4096, 4096, {"residual": True}),
    "6144 of 4096, bias": (6144, 4096, {"bias": True}),
    "14336 of 4096, gated": (14336, 4096, {"gated": True}),
    "4096 of 14336, residual": (4096, 14336, {"residual": True}),
    "20000 of 2056, gated, bias, residual": (20000, 2056, {"gated": True, "bias": True, "residual": True}),
    "5001 of 3592, bias": (5001, 3592, {"bias": True}),
    "7680 of 4608": (7680, 4608, {}),
    "12288 of 4608, gated": (12288, 4608, {"gated": True}),
    "4608 of 12288, residual": (4608, 12288, {"residual": True}),
    "576 of 1536": (576, 1536, {}),
    "70000 of 520, as an LM head": (70000, 520, {}),
    "49152 of 576, as the demo's": (49152, 576, {}),
    "34000 of 1000, bias, residual": (34000, 1000, {"bias": True, "residual": True}),
}
"""Outputs, inputs, and what else the linear has."""
THREES = {
    (528, 8200, 70): "2x128/3",
    (528, 8200, 130): "2x64/3",
    (7700, 568, 130): "3x64/1",
    (17000, 264, 70): "3x128/1",
}
"""Outputs, inputs and rows of the smallest linears that get these tiles on an H200."""
NARROW = {
    "960 of 576": lambda: linear(torch.bfloat16, 960, 576, normed=True),
    "1536 of 576, gated": lambda: linear(torch.bfloat16, 1536, 576, gated=True, normed=True),
    "8192 of 576, residual": lambda: linear(torch.bfloat16, 8192, 576, residual=True, normed=True),
    "333 of 72, bias": lambda: linear(torch.bfloat16, 333, 72, bias=True, normed=True),
    "1000 of 1000, gated, bias, residual": lambda: linear(
        torch.bfloat16, 1000, 1000, gated=True, bias=True, residual=True, normed=True
    ),
    "203 of 1152": lambda: linear(torch.bfloat16, 203, 1152, normed=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
EVERY_NARROW = pytest.mark.parametrize("shape", NARROW)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def rows_of(inputs: list[Tensor], first: int, last: int) -> list[Tensor]:
    return [one[first:last].clone() for one in inputs]


def made(shape: str, dtype: torch.dtype) -> tuple[RowOp, list[Tensor], list[Tensor]]:
    """The op, inputs of most rows, and what it says of them all."""
    out, inner, options = SHAPES[shape]
    op = linear(dtype, out, inner, **options)
    inputs = op.inputs(MOST)
    return op, inputs, op(inputs)


@pytest.mark.sanitizer
@pytest.mark.parametrize("count", [17, 40])
@HALF_WIDTHS
def test_few_rows_of_a_tall_weight_stay_in_their_place(dtype: torch.dtype, count: int) -> None:
    """One tile of 128 weight rows more than an H200 has multiprocessors: one of them takes two."""
    op = linear(dtype, 16930, 264, bias=True)
    inputs = op.inputs(count)
    assert_right(op, op(inputs), op.expected(inputs))


@EVERY_SHAPE
@HALF_WIDTHS
def test_a_row_is_the_same_in_batches_of_every_size(shape: str, dtype: torch.dtype) -> None:
    op, inputs, whole = made(shape, dtype)
    for count in COUNTS:
        assert_same(op(rows_of(inputs, 0, count)), [one[:count] for one in whole])
        assert_same(op(rows_of(inputs, MOST - count, MOST)), [one[MOST - count :] for one in whole])


@EVERY_SHAPE
@HALF_WIDTHS
def test_a_row_among_many_is_the_same_alone(shape: str, dtype: torch.dtype) -> None:
    op, inputs, whole = made(shape, dtype)
    for row in (0, 31, 32, 127, 128, 300, MOST - 1):
        assert_same(op(rows_of(inputs, row, row + 1)), [one[row : row + 1] for one in whole])


@EVERY_SHAPE
@HALF_WIDTHS
def test_only_as_many_rows_are_written_as_are_given(shape: str, dtype: torch.dtype) -> None:
    op, inputs, whole = made(shape, dtype)
    for count in (0, 1, 40, 257, MOST):
        results = [torch.full_like(one, 77) for one in whole]
        op.run([one[:count] for one in inputs], [one[:count] for one in results])
        expected = [torch.full_like(one, 77) for one in whole]
        for one, right in zip(expected, whole, strict=True):
            one[:count] = right[:count]
        assert_same(results, expected)


@EVERY_NARROW
def test_a_normed_row_is_the_same_in_batches_of_every_size_and_alone(shape: str) -> None:
    op = NARROW[shape]()
    inputs = op.inputs(MOST)
    whole = op(inputs)
    few = rows_of(inputs, 0, 128)
    assert_right(op, op(few), op.expected(few))
    for count in COUNTS:
        assert_same(op(rows_of(inputs, 0, count)), [one[:count] for one in whole])
        assert_same(op(rows_of(inputs, MOST - count, MOST)), [one[MOST - count :] for one in whole])


@EVERY_NARROW
def test_a_normed_row_does_not_see_what_lies_past_the_rows(shape: str) -> None:
    """More rows are in the buffer than are given, and they are not numbers."""
    op = NARROW[shape]()
    inputs = op.inputs(100)
    for count in (0, 1, 20, 32, 33, 100):
        given = rows_of(inputs, 0, 100)
        given[0][count:] = torch.nan
        results = [torch.full_like(one, 77) for one in op(inputs)]
        op.run([one[:count] for one in given], [one[:count] for one in results])
        assert all(bool((one[count:] == 77).all()) for one in results)
        if count:
            assert_same([one[:count] for one in results], op(rows_of(inputs, 0, count)))


@pytest.mark.sanitizer
@pytest.mark.parametrize("count", [17, 70])
def test_few_normed_rows_stay_in_their_place(count: int) -> None:
    for options in ({"bias": True}, {"gated": True, "residual": True}):
        op = linear(torch.bfloat16, 104, 584, normed=True, **options)
        inputs = op.inputs(count)
        assert_right(op, op(inputs), op.expected(inputs))


@pytest.mark.sanitizer
@pytest.mark.parametrize("count", [17, 40, 130])
@HALF_WIDTHS
def test_few_of_many_rows_stay_in_their_place(dtype: torch.dtype, count: int) -> None:
    for options in ({"bias": True}, {"gated": True, "residual": True}):
        # Weights just large enough for the kernel of many rows on an H200.
        op = linear(dtype, 656 if "gated" in options else 1300, 3400, **options)
        inputs = op.inputs(count)
        assert_right(op, op(inputs), op.expected(inputs))


@pytest.mark.sanitizer
@pytest.mark.parametrize(("out", "inner", "count"), THREES)
def test_few_of_many_rows_stay_in_their_place_with_three_ctas_or_groups(out: int, inner: int, count: int) -> None:
    op = linear(torch.bfloat16, out, inner, bias=True)
    inputs = op.inputs(count)
    assert_right(op, op(inputs), op.expected(inputs))


@EVERY_SHAPE
@HALF_WIDTHS
def test_many_rows_are_near_the_reference(shape: str, dtype: torch.dtype) -> None:
    op, inputs, whole = made(shape, dtype)
    assert_right(op, whole, op.expected(inputs))


@HALF_WIDTHS
def test_many_rows_may_be_computed_in_a_graph(dtype: torch.dtype) -> None:
    op, inputs, whole = made("4096 of 4096, residual", dtype)
    results = [torch.zeros_like(one) for one in whole]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(inputs, results)
    graph.replay()
    assert_same(results, whole)


@HALF_WIDTHS
def test_a_prompt_gets_the_bits_of_its_tokens(dtype: torch.dtype) -> None:
    if not fast_for_many_rows(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this device has no linear for many rows")
    x, weight = randn(700, 4096, dtype=dtype), randn(4096, 4096, dtype=dtype, scale=1 / 64)
    residual, norm = randn(700, 2048, dtype=dtype), (randn(4096, dtype=dtype), 1e-5)
    whole = cuda.linear_of_any(x, weight), cuda.fused_linear_of_any(x, weight, residual=residual, gated=True, norm=norm)
    for first, last in ((0, 1), (699, 700), (3, 20), (100, 356)):
        part = x[first:last].clone(), residual[first:last].clone()
        assert_same([cuda.linear_of_any(part[0], weight)], [whole[0][first:last]])
        assert_same(
            [cuda.fused_linear_of_any(part[0], weight, residual=part[1], gated=True, norm=norm)], [whole[1][first:last]]
        )
