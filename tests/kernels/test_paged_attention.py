from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_cases import DTYPES, PagedCase, assert_near, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


def attention_by_definition(case: PagedCase) -> Tensor:
    """One query head and one position at a time, in float64."""
    out = torch.empty(case.q.shape[0], case.q.shape[1], case.value_dim, dtype=torch.float64)
    starts = case.query_starts.tolist()
    for row, context in enumerate(case.contexts):
        for query in range(starts[row], starts[row + 1]):
            position = context - (starts[row + 1] - query)
            oldest = max(0, position - case.window + 1) if case.window > 0 else 0
            seen = torch.arange(oldest, position + 1)
            pages, slots = case.block_tables[row][seen // case.block_size].long(), seen % case.block_size
            for head in range(case.q.shape[1]):
                kv_head = head // case.group
                scores = case.k_pool[pages, kv_head, slots].double() @ case.q[query, head].double() * case.scaling
                if case.softcap > 0:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                out[query, head] = scores.softmax(0) @ case.v_pool[pages, kv_head, slots].double()
    return out.to(case.dtype)


CASES = {
    "one_query_each": {"contexts": [1, 15, 16, 17, 100], "queries": [1, 1, 1, 1, 1]},
    "ragged_queries": {"contexts": [9, 33, 50], "queries": [9, 1, 7]},
    "rows_without_queries": {"contexts": [20, 5, 40], "queries": [0, 2, 0]},
    "sixteen_and_more_queries": {"contexts": [40, 70, 17], "queries": [16, 41, 17]},
    "window": {"contexts": [5, 60, 33], "queries": [1, 4, 3], "window": 10},
    "window_of_one": {"contexts": [40, 7], "queries": [3, 1], "window": 1},
    "scores_turned_round": {"contexts": [40, 7], "queries": [3, 1], "scaling": -0.125},
    "softcap": {"contexts": [40, 7], "queries": [3, 1], "softcap": 2.0},
    "softcap_and_window": {"contexts": [40, 70], "queries": [3, 20], "softcap": 5.0, "window": 18},
    "odd_block_size": {"contexts": [40, 7], "queries": [3, 1], "block_size": 5},
    "no_rows": {"contexts": [], "queries": []},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_native_and_reference_attend_as_defined(dtype: torch.dtype, name: str) -> None:
    case = PagedCase(dtype=dtype, **CASES[name])  # type: ignore[arg-type]
    expected = attention_by_definition(case)
    assert_near(native.paged_attention(*case.arguments()), expected)
    assert_near(reference.paged_attention(*case.arguments()), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (20, 20), (7, 5), (192, 128)]
)
def test_any_head_width_and_group_size(dtype: torch.dtype, group: int, key_dim: int, value_dim: int) -> None:
    case = PagedCase(
        contexts=[37, 18],
        queries=[2, 1],
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        scaling=key_dim**-0.5,
    )
    assert_near(native.paged_attention(*case.arguments()), reference.paged_attention(*case.arguments()))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("ops", ["reference", "native"])
def test_slots_past_the_context_and_freed_pages_are_never_read(ops: str, window: int) -> None:
    attend = {"reference": reference, "native": native}[ops].paged_attention
    case = PagedCase(contexts=[1, 17, 50, 40], queries=[1, 2, 5, 30], window=window)
    assert case.k_pool.isnan().any(), "the case holds poison"
    assert attend(*case.arguments()).isfinite().all()


def test_pages_that_fell_out_of_the_window_are_never_read() -> None:
    case = PagedCase(contexts=[100], queries=[2], window=20)
    case.k_pool[case.block_tables[0, :4].long()] = float("nan")
    case.v_pool[case.block_tables[0, :4].long()] = float("nan")
    case.block_tables[0, :4] = -1
    assert native.paged_attention(*case.arguments()).isfinite().all()


def test_a_later_query_of_the_row_with_bad_values_leaves_earlier_queries_alone() -> None:
    case = PagedCase(contexts=[20], queries=[4])
    clean = native.paged_attention(*case.arguments())
    page, slot = case.block_tables[0, 1].item(), 3
    case.k_pool[page, :, slot] = float("nan")
    case.v_pool[page, :, slot] = float("nan")
    poisoned = native.paged_attention(*case.arguments())
    assert_same_bits(poisoned[:3], clean[:3])
    assert poisoned[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (30, 4.0)])
@pytest.mark.parametrize("width", [64, 20, 7])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(
    dtype: torch.dtype, window: int, softcap: float, width: int
) -> None:
    case = PagedCase(
        contexts=[1, 70, 33, 200, 64, 90],
        queries=[1, 3, 1, 16, 2, 40],
        key_dim=width,
        value_dim=width,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    together = native.paged_attention(*case.arguments())
    starts = case.query_starts.tolist()
    for row, context in enumerate(case.contexts):
        owned = slice(starts[row], starts[row + 1])
        alone = native.paged_attention(
            case.q[owned],
            case.k_pool,
            case.v_pool,
            case.block_tables[row : row + 1],
            torch.tensor([0, case.queries[row]], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            case.scaling,
            window,
            softcap,
        )
        assert_same_bits(alone, together[owned])


@pytest.mark.parametrize("width", [64, 7])
def test_a_query_is_bitwise_the_same_alone_and_among_the_queries_of_its_row(width: int) -> None:
    case = PagedCase(contexts=[60], queries=[40], key_dim=width, value_dim=width)
    together = native.paged_attention(*case.arguments())
    one = torch.tensor([0, 1], dtype=torch.int32)
    for query in range(40):
        length = torch.tensor([20 + query + 1], dtype=torch.int32)
        alone = native.paged_attention(
            case.q[query : query + 1], case.k_pool, case.v_pool, case.block_tables, one, length, case.scaling
        )
        assert_same_bits(alone, together[query : query + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    case = PagedCase(contexts=[300, 70, 33, 200], queries=[1, 3, 1, 16], dtype=dtype)
    _native.set_num_threads(1)
    expected = native.paged_attention(*case.arguments())
    for threads in (2, 3, 5):
        _native.set_num_threads(threads)
        for _ in range(5):
            assert_same_bits(native.paged_attention(*case.arguments()), expected)


def test_pages_outside_the_pool_and_impossible_lengths_are_refused() -> None:
    case = PagedCase(contexts=[40, 20], queries=[1, 2])
    q, k_pool, v_pool, tables, starts, lens, *rest = case.arguments()
    wrong = tables.clone()
    wrong[1, 1] = k_pool.shape[0]
    with pytest.raises(IndexError, match=r"block_tables\[1\]"):
        native.paged_attention(q, k_pool, v_pool, wrong, starts, lens, *rest)
    with pytest.raises(IndexError, match=r"context_lens\[1\]: got 1, expected at least the row's 2 queries"):
        native.paged_attention(q, k_pool, v_pool, tables, starts, torch.tensor([40, 1]).int(), *rest)
    with pytest.raises(IndexError, match=r"context_lens\[0\]: got 1000"):
        native.paged_attention(q, k_pool, v_pool, tables, starts, torch.tensor([1000, 20]).int(), *rest)
    with pytest.raises(IndexError, match="query_starts"):
        native.paged_attention(q, k_pool, v_pool, tables, torch.tensor([0, 1, 9]).int(), lens, *rest)
