"""The wrappers refuse what the native code cannot take, and name it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.kernels.kernel_cases import PagedCase

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


def linear_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4), **changed}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, TypeError, "x: got torch.float64, expected float32"),
        ({"x": torch.zeros(2, 8, dtype=torch.int64)}, TypeError, "x: got torch.int64"),
        ({"weight": torch.zeros(4, 8).half()}, TypeError, "weight: got torch.float16, expected torch.float32"),
        ({"bias": torch.zeros(4).bfloat16()}, TypeError, "bias: got torch.bfloat16, expected torch.float32"),
        ({"x": torch.zeros(2, 7)}, ValueError, r"x: got shape \[2, 7\], expected \[..., 8\]"),
        ({"x": torch.zeros(())}, ValueError, r"x: got shape \[\]"),
        ({"weight": torch.zeros(8)}, ValueError, r"weight: got shape \[8\], expected 2 dimensions"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias: got shape \[5\], expected \[N\] = \[4\]"),
        ({"bias": torch.zeros(1, 4)}, ValueError, r"bias: got shape \[1, 4\]"),
        ({"weight": torch.zeros(8, 4).T}, ValueError, r"weight: got strides \[1, 4\], expected a contiguous tensor"),
        ({"x": torch.zeros(8, 2).T}, ValueError, "x: got stride 2 in the last dimension, expected 1"),
        ({"x": torch.zeros(2, 8, device="meta")}, ValueError, "x: got a tensor on meta, expected cpu"),
        ({"weight": torch.zeros(4, 8, device="meta")}, ValueError, "weight: got a tensor on meta, expected cpu"),
    ],
)
def test_linear_names_the_argument_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    native.linear(**linear_arguments())
    with pytest.raises(error, match=message):
        native.linear(**linear_arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(2, 8).double()}, TypeError, "x: got torch.float64"),
        ({"weight": torch.zeros(8).half()}, TypeError, "weight: got torch.float16"),
        ({"weight": torch.zeros(7)}, ValueError, r"x: got shape \[2, 8\], expected \[..., 7\]"),
        ({"weight": torch.zeros(1, 8)}, ValueError, r"weight: got shape \[1, 8\], expected 1 dimensions"),
        ({"weight": torch.zeros(16)[::2]}, ValueError, r"weight: got strides \[2\]"),
        ({"x": torch.zeros(8, 2).T}, ValueError, "x: got stride 2"),
    ],
)
def test_rms_norm_names_the_argument_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        native.rms_norm(**{"x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 1e-5, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": torch.zeros(3, 2, 8).half()}, TypeError, "v: got torch.float32, expected torch.float16"),
        ({"k_pool": torch.zeros(4, 2, 16, 8).half()}, TypeError, "k_pool: got torch.float16"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, TypeError, "slots: got torch.int32, expected torch.int64"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, ValueError, r"slots: got shape \[2\], expected \[T\] = \[3\]"),
        ({"k": torch.zeros(2, 8)}, ValueError, r"k: got shape \[2, 8\], expected 3 dimensions"),
        ({"k": torch.zeros(3, 4, 8)}, ValueError, r"k: got shape \[3, 4, 8\]"),
        ({"v": torch.zeros(3, 2, 9)}, ValueError, r"v: got shape \[3, 2, 9\]"),
        ({"v_pool": torch.zeros(5, 2, 16, 6)}, ValueError, r"v_pool: got shape \[5, 2, 16, 6\]"),
        ({"v_pool": torch.zeros(2, 16, 6)}, ValueError, r"v_pool: got shape \[2, 16, 6\], expected 4 dimensions"),
        ({"k_pool": torch.zeros(4, 16, 2, 8).transpose(1, 2)}, ValueError, "k_pool: got strides"),
        ({"k": torch.zeros(3, 8, 2).transpose(1, 2)}, ValueError, "k: got stride 2 in the last dimension"),
    ],
)
def test_write_kv_names_the_argument_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 6),
        "k_pool": torch.zeros(4, 2, 16, 8),
        "v_pool": torch.zeros(4, 2, 16, 6),
        "slots": torch.arange(3),
    }
    native.write_kv(**arguments)
    with pytest.raises(error, match=message):
        native.write_kv(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": torch.zeros(3, 6, 64).double()}, TypeError, "q: got torch.float64"),
        (
            {"q": torch.zeros(3, 5, 64)},
            ValueError,
            r"q: got shape \[3, 5, 64\], expected \[T, a multiple of k_pool's 2",
        ),
        ({"q": torch.zeros(3, 6, 32)}, ValueError, r"q: got shape \[3, 6, 32\]"),
        ({"q": torch.zeros(3, 64, 6).transpose(1, 2)}, ValueError, "q: got stride 6"),
        ({"q": torch.zeros(6, 64)}, ValueError, r"q: got shape \[6, 64\], expected 3 dimensions"),
        ({"block_tables": torch.zeros(2, 4)}, TypeError, "block_tables: got torch.float32, expected torch.int32"),
        ({"block_tables": torch.zeros(3, 4).int()}, ValueError, r"block_tables: got shape \[3, 4\]"),
        ({"query_starts": torch.zeros(2).int()}, ValueError, r"query_starts: got shape \[2\], expected \[R \+ 1\]"),
        ({"query_starts": torch.zeros(3).long()}, TypeError, "query_starts: got torch.int64"),
        ({"context_lens": torch.zeros(2).long()}, TypeError, "context_lens: got torch.int64"),
        ({"context_lens": torch.zeros(2, 1).int()}, ValueError, r"context_lens: got shape \[2, 1\]"),
    ],
)
def test_paged_attention_names_the_argument_it_refuses(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = PagedCase(contexts=[20, 30], queries=[1, 2])
    names = ("q", "k_pool", "v_pool", "block_tables", "query_starts", "context_lens", "scaling")
    arguments = dict(zip(names, case.arguments()[: len(names)], strict=True))
    native.paged_attention(**arguments)
    with pytest.raises(error, match=message):
        native.paged_attention(**{**arguments, **changed})


def test_the_native_module_itself_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="dtype: got code 7"):
        _native.linear(7, 7, 0, 0, 0, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="sizes must not be negative"):
        _native.linear(0, 0, 0, 0, 0, 0, -1, 1, 1)
