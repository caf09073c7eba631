"""The CUDA ops against their references, and what all of them promise: any number of rows; a row's result whatever its
batch; nothing written elsewhere; graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import (
    DEVICE,
    NARROW,
    ROW_OPS,
    TABLE_ROWS,
    assert_right,
    assert_same,
    indices,
    randn,
)
from tests.kernels.cycle_arguments import router_weights
from tests.kernels.kernel_cases import DTYPES, TOLERANCES
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.ops import RouterWeights, Top2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
INF, NAN = math.inf, math.nan
GUARD = 77
EVERY_OP = pytest.mark.parametrize("name", ROW_OPS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def poison(inputs: list[Tensor], first: int) -> list[Tensor]:
    """Copies whose rows from `first` on must not be read: NaN, and indices far outside everything."""
    copies = [one.clone() for one in inputs]
    for one in copies:
        one[first:] = NAN if one.is_floating_point() else 2**40
    return copies


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 17, 33, 64, 70])
def test_an_op_gives_what_its_reference_gives(name: str, dtype: torch.dtype, rows: int) -> None:
    op = ROW_OPS[name](dtype)
    inputs = op.inputs(rows)
    assert_right(op, op(inputs), op.expected(inputs))


@pytest.mark.parametrize("name", NARROW)
@EVERY_DTYPE
def test_there_may_be_more_than_65536_rows(name: str, dtype: torch.dtype) -> None:
    op = ROW_OPS[name](dtype)
    inputs = op.inputs(70_001)
    assert_right(op, op(inputs), op.expected(inputs))


@EVERY_OP
@EVERY_DTYPE
def test_a_row_is_the_same_alone_and_in_every_batch(name: str, dtype: torch.dtype) -> None:
    op = ROW_OPS[name](dtype)
    inputs = op.inputs(70)
    batch = op(inputs)
    for first, last in ((0, 1), (13, 14), (69, 70), (4, 9), (20, 36), (3, 36), (0, 64)):
        part = op([one[first:last].clone() for one in inputs])
        assert_same(part, [one[first:last] for one in batch])


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, 11])
@EVERY_OP
def test_a_small_call_is_clean(name: str, rows: int) -> None:
    op = ROW_OPS[name](torch.bfloat16)
    inputs = op.inputs(rows)
    assert_right(op, op(inputs), op.expected(inputs))


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize(("rows", "used"), [(17, 9), (33, 32), (5, 0), (70, 3)])
def test_rows_past_those_given_are_neither_read_nor_written(
    name: str, dtype: torch.dtype, rows: int, used: int
) -> None:
    op = ROW_OPS[name](dtype)
    inputs = op.inputs(rows)
    whole, results = op(inputs), op.results(rows)
    for one in results:
        one.fill_(GUARD)
    op.run([one[:used] for one in poison(inputs, used)], [one[:used] for one in results])
    assert_same([one[:used] for one in results], [one[:used] for one in whole])
    assert all((one[used:] == GUARD).all() for one in results)


@EVERY_OP
@EVERY_DTYPE
def test_rows_may_lie_apart_and_anywhere(name: str, dtype: torch.dtype) -> None:
    op = ROW_OPS[name](dtype)
    inputs, results = op.inputs(9), op.results(9)
    spread = [_spread(one) if one.dim() == 2 and one.shape[1] > 1 else one for one in inputs]
    outs = [_spread(one) if one.dim() == 2 and one.shape[1] > 1 else one for one in results]
    if name.startswith("rotary"):
        spread[1:] = inputs[1:]  # tables are contiguous
    op.run(spread, outs)
    if name.startswith("linear"):
        assert_right(op, outs, op.expected(inputs))  # loose rows may take another kernel
    else:
        assert_same(outs, op(inputs))


def _spread(rows: Tensor) -> Tensor:
    """The same numbers in rows that are three elements further apart, from an odd address on."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 3), GUARD, dtype=rows.dtype, device=rows.device)
    apart = wide[:, 1:-2]
    apart.copy_(rows)
    return apart


@EVERY_OP
def test_a_captured_op_follows_its_inputs(name: str) -> None:
    op = ROW_OPS[name](torch.bfloat16)
    inputs = op.inputs(12)
    results = op(inputs)  # before the capture, so that nothing is loaded during it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(inputs, results)
    for _ in range(2):
        others = op.inputs(12)
        for one, other in zip(inputs, others, strict=True):
            one.copy_(other)
        for one in results:
            one.fill_(GUARD)
        graph.replay()
        assert_same(results, op(others))


@EVERY_OP
def test_with_given_results_and_scratch_nothing_is_allocated(name: str) -> None:
    if name.split()[0] in ("top2_logsumexp", "router"):
        pytest.skip("its scratch has a test of its own")
    op = ROW_OPS[name](torch.bfloat16)  # a norm in front of a float16 linear has a result of its own
    inputs, results = op.inputs(7), op.results(7)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    op.run(inputs, results)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_one_scratch_serves_many_calls_and_its_counters_return_to_zero() -> None:
    weights = RouterWeights(*router_weights(DEVICE))
    scratch = cuda.Scratch.sized(torch.device(DEVICE, 0), 40, vocabulary=50_000, bottleneck=len(weights.down))
    for rows, width in ((40, 50_000), (3, 9000), (40, 4097), (1, 50_000), (7, 11)):
        logits, features = randn(rows, width, dtype=torch.float16), randn(rows, 48, dtype=torch.float16)
        top2 = cuda.top2_logsumexp(logits)
        scores = cuda.router(features, top2, weights)
        mine, out = Top2(*(torch.empty_like(one) for one in top2)), torch.empty_like(scores)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        cuda.top2_logsumexp(logits, scratch=scratch, out=mine)
        cuda.router(features, mine, weights, scratch=scratch, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert_same([*mine, out], [*top2, scores])
        assert not scratch.counters.any()


@pytest.mark.parametrize("padding", [0, 3, 5000, 12_288])
@EVERY_DTYPE
@pytest.mark.parametrize(
    "row", [[1.0, 3.0, 3.0], [-0.0, 0.0], [0.0, INF, 2.0, INF], [-INF, -5.0], [INF, NAN, 1.0, NAN], [NAN, 2.0], [-INF]]
)
def test_peaks_of_equal_infinite_and_missing_numbers(row: list[float], dtype: torch.dtype, padding: int) -> None:
    for before, after in ((padding, 0), (0, padding), (padding, padding)):
        rows = torch.tensor([[-INF] * before + row + [-INF] * after, [0.5] * (before + len(row) + after)])
        logits = rows.to(DEVICE, dtype)
        top2, expected = cuda.top2_logsumexp(logits), reference.top2_logsumexp(logits.cpu())
        for one, other in zip(top2, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, equal_nan=True)


@EVERY_DTYPE
def test_features_that_are_no_numbers_give_no_score_and_change_no_other(dtype: torch.dtype) -> None:
    weights = RouterWeights(*router_weights(DEVICE))
    features, logits = randn(40, 48, dtype=dtype), randn(40, 300, dtype=dtype)
    top2 = cuda.top2_logsumexp(logits)
    expected = cuda.router(features, top2, weights)
    features[3] = expected[3] = NAN
    scores = cuda.router(features, top2, weights)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("width", [3, 576])
def test_a_small_scatter_is_clean(width: int) -> None:
    x, places = randn(5, width, dtype=torch.bfloat16), torch.tensor([3, -1, 0, 9, 7], device=DEVICE)
    out = torch.full((8, width), GUARD, dtype=x.dtype, device=DEVICE)
    expected = out.clone()
    cuda.scatter_rows(x, places, out)
    reference.scatter_rows(x, places, expected)
    assert_same([out], [expected])


@EVERY_DTYPE
@pytest.mark.parametrize("width", [1, 3, 8, 576])
def test_rows_are_embedded_and_scattered_by_index(dtype: torch.dtype, width: int) -> None:
    x, index = randn(TABLE_ROWS, width, dtype=dtype), indices(33)
    index[::4], index[5] = -1, TABLE_ROWS
    torch.testing.assert_close(cuda.embed(index, x), reference.embed(index, x), rtol=0, atol=0, equal_nan=True)
    ids = indices(9)
    assert_same([cuda.embed(ids, x)], [torch.nn.functional.embedding(ids, x)])
    places = torch.randperm(60, device=DEVICE)[:TABLE_ROWS]
    places[2], places[7] = -5, 60
    for used in (TABLE_ROWS, 0, 31):
        out = torch.full((60, width), GUARD, dtype=dtype, device=DEVICE)
        expected = out.clone()
        cuda.scatter_rows(x[:used], places[:used], out)
        reference.scatter_rows(x[:used], places[:used], expected)
        assert_same([out], [expected])


@EVERY_DTYPE
@pytest.mark.parametrize(("width", "deep_width"), [(5, 5), (576, 576), (4608, 1152), (576, 43)])
def test_an_exit_without_a_deep_state_reads_none(dtype: torch.dtype, width: int, deep_width: int) -> None:
    """The deep state of a narrow head is less wide than the states."""
    sizes = (4, width), (3, deep_width), (3, width + deep_width)
    states, deep, table = (randn(*size, dtype=dtype) for size in sizes)
    norm, deep_norm = randn(width, dtype=dtype), randn(deep_width, dtype=dtype)
    slots, distances = torch.tensor([2**40, -1, 2, 3], device=DEVICE), torch.tensor([0, 1, 99, 1], device=DEVICE)
    found = cuda.exit_input(states, norm, deep, slots, deep_norm, distances, table, 1e-5)
    expected = reference.exit_input(states, norm, deep, slots, deep_norm, distances, table, 1e-5)
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype], equal_nan=True)
    assert_same([found[0, width:], found[1, width:]], [table[0, width:], table[1, width:]])
    assert found[3, width:].isnan().all()


@pytest.mark.parametrize("rows", [1, 64, 65])
@EVERY_DTYPE
def test_a_normed_linear_is_near_its_reference_for_any_number_of_rows(dtype: torch.dtype, rows: int) -> None:
    x, weight = randn(rows, 576, dtype=dtype, scale=20.0), randn(2 * 320, 576, dtype=dtype, scale=576**-0.5)
    norm, residual = (randn(576, dtype=dtype), 1e-5), randn(rows, 320, dtype=dtype)
    found = cuda.fused_linear_of_any(x, weight, residual=residual, gated=True, norm=norm)
    expected = reference.fused_linear(x, weight, None, residual, True, norm)
    # The reference rounds twice where x becomes normed, so both are a few roundings away from the truth.
    tolerance = {name: 2 * value for name, value in TOLERANCES[dtype].items()}
    torch.testing.assert_close(found, expected, **tolerance)


def test_an_op_runs_on_the_current_stream() -> None:
    x, weight = randn(64, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    expected = cuda.rms_norm(x, weight, 1e-5)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        slow = randn(4096, 4096, dtype=torch.float32)
        for _ in range(8):
            slow = slow @ slow * 1e-2
        filled = torch.zeros_like(x).copy_(x)
        result = cuda.rms_norm(filled, weight, 1e-5)
        assert not stream.query(), "it was not waited for"
    stream.synchronize()
    assert_same([result], [expected])


def test_rows_may_be_computed_in_place() -> None:
    x, weight = randn(9, 576, dtype=torch.bfloat16), randn(576, dtype=torch.bfloat16)
    expected = cuda.rms_norm(x, weight, 1e-5)
    own = x.clone()
    assert_same([cuda.rms_norm(own, weight, 1e-5, out=own)], [expected])
    gate, up = randn(9, 576, dtype=torch.bfloat16), randn(9, 576, dtype=torch.bfloat16)
    expected = cuda.silu_mul(gate, up)
    assert_same([cuda.silu_mul(gate, up, out=gate)], [expected])
    heads, turn = randn(9, 4, 64, dtype=torch.bfloat16), [randn(9, 64, dtype=torch.bfloat16) for _ in range(2)]
    expected = cuda.rotary(heads, *turn)
    assert_same([cuda.rotary(heads, *turn, out=heads)], [expected])
    states, square = randn(9, 576, dtype=torch.bfloat16), randn(576, 576, dtype=torch.bfloat16)
    expected = cuda.linear(x, square, residual=states)
    assert_same([cuda.linear(x, square, residual=states, out=states)], [expected])
