"""The gate of an MLP and rotary positions: native against reference, and reference against the library."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.kernels.kernel_cases import DTYPES, assert_near, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1536), (2, 3, 33), (3, 1), (1, 8, 1536), (300, 96)])
def test_native_silu_mul_matches_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = ((torch.randn(shape) * 5).to(dtype) for _ in range(2))
    assert_near(native.silu_mul(gate, up), reference.silu_mul(gate, up))


def test_silu_mul_keeps_nan_and_survives_extremes() -> None:
    gate = torch.tensor([float("nan"), 1e30, -1e30, 200.0, -200.0, 0.0, -0.0])
    y = native.silu_mul(gate, torch.ones(7))
    assert torch.isnan(y[0])
    assert_near(y[1:], torch.tensor([1e30, 0.0, 200.0, 0.0, 0.0, 0.0]))


def test_silu_mul_is_bitwise_the_same_for_a_row_alone() -> None:
    gate, up = torch.randn(9, 1001), torch.randn(9, 1001)
    whole = native.silu_mul(gate, up)
    for row in range(9):
        torch.testing.assert_close(native.silu_mul(gate[row], up[row]), whole[row], rtol=0, atol=0)


def library_layout(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Heads as a layer gives them: [T, H, D] in memory, with other data between tokens."""
    return torch.randn(num_tokens, num_heads + 2, dim).to(dtype)[:, :num_heads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dim"), [(0, 2, 8), (1, 9, 64), (5, 3, 80), (3, 1, 6), (70, 8, 128)]
)
def test_native_rotary_matches_the_reference(dtype: torch.dtype, num_tokens: int, num_heads: int, dim: int) -> None:
    x = library_layout(num_tokens, num_heads, dim, dtype)
    cos, sin = (torch.rand(num_tokens, dim).to(dtype) for _ in range(2))
    assert_near(native.rotary(x, cos, sin), reference.rotary(x, cos, sin))


def test_the_rotary_reference_is_the_librarys_bit_for_bit() -> None:
    q, k = library_layout(5, 4, 16, torch.float32), library_layout(5, 2, 16, torch.float32)
    cos, sin = torch.rand(5, 16), torch.rand(5, 16)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    for x, library in zip((q, k), expected, strict=True):
        assert_same_bits(reference.rotary(x, cos, sin), library[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gate": torch.zeros(2, 8).double()}, TypeError, "gate: got torch.float64"),
        ({"up": torch.zeros(2, 8).half()}, TypeError, "up: got torch.float16, expected torch.float32"),
        ({"up": torch.zeros(2, 7)}, ValueError, r"up: got shape \[2, 7\]"),
        ({"gate": torch.zeros(8, 2).T}, ValueError, "gate: got strides"),
    ],
)
def test_silu_mul_names_the_argument_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"gate": torch.zeros(2, 8), "up": torch.zeros(2, 8)}
    native.silu_mul(**arguments)
    with pytest.raises(error, match=message):
        native.silu_mul(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, 8).double()}, TypeError, "x: got torch.float64"),
        ({"x": torch.zeros(2, 8)}, ValueError, r"x: got shape \[2, 8\], expected 3 dimensions"),
        ({"x": torch.zeros(2, 8, 3).transpose(1, 2)}, ValueError, "x: got stride 3"),
        ({"cos": torch.zeros(2, 7)}, ValueError, r"cos: got shape \[2, 7\]"),
        ({"sin": torch.zeros(3, 8)}, ValueError, r"sin: got shape \[3, 8\]"),
        ({"sin": torch.zeros(2, 8).half()}, TypeError, "sin: got torch.float16"),
        ({"x": torch.zeros(2, 3, 7), "cos": torch.zeros(2, 7), "sin": torch.zeros(2, 7)}, ValueError, "even number"),
    ],
)
def test_rotary_names_the_argument_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"x": torch.zeros(2, 3, 8), "cos": torch.zeros(2, 8), "sin": torch.zeros(2, 8)}
    native.rotary(**arguments)
    with pytest.raises(error, match=message):
        native.rotary(**{**arguments, **changed})
