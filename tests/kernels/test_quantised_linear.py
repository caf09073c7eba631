"""Block-quantised matrices: their numbers are those of the gguf package, and products have one order."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tests.kernels.kernel_cases import assert_same_bits
from tide_core.kernels.panels import KINDS, Panels
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")
HALVES = {"Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
FUSED = ("avx2", "avx512", "vnni", "amx", "dotprod")
"""They add with one rounding, in one order."""


def blocks_of(kind: str, out_features: int, in_features: int) -> torch.Tensor:
    """Rows of blocks with any codes and factors, and halves of a usual size with either sign."""
    random = np.random.default_rng(out_features)
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (out_features, in_features // size, num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = random.uniform(-0.02, 0.02, blocks.shape[:2]).astype("<f2")
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(out_features, -1))


def numbers_of(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [1, 16, 37])
def test_rows_are_the_numbers_that_the_gguf_package_reads(kind: str, out_features: int) -> None:
    blocks = blocks_of(kind, out_features, 512)
    panels = Panels.pack(kind, blocks, 512)
    expected = numbers_of(kind, blocks)
    assert_same_bits(panels.whole(), expected)
    assert (
        panels.values([0, 513 % expected.numel()]).tolist() == expected.flatten()[[0, 513 % expected.numel()]].tolist()
    )


def test_rows_can_be_put_into_another_order() -> None:
    blocks, order = blocks_of("Q4_1", 40, 64), torch.randperm(40)
    assert_same_bits(Panels.pack("Q4_1", blocks, 64, order).whole(), numbers_of("Q4_1", blocks)[order])


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_that_of_the_reference(kind: str, instruction_set: str) -> None:
    panels = Panels.pack(kind, blocks_of(kind, 37, 512), 512)
    bias = torch.randn(37)
    for rows in (1, 4, 13):
        x = torch.randn(rows, 512)
        for added in (None, bias):
            expected = reference.quantised_linear(x, panels, added)
            error = (native.quantised_linear(x, panels, added) - expected).abs().max()
            assert error <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_bitwise_the_same_alone_and_at_any_place_in_any_batch(kind: str, instruction_set: str) -> None:
    panels = Panels.pack(kind, blocks_of(kind, 50, 512), 512)
    x = torch.randn(300, 512)
    alone = torch.stack([native.quantised_linear(row, panels) for row in x])
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 257, 300):
        assert_same_bits(native.quantised_linear(x[:rows], panels), alone[:rows])
        assert_same_bits(native.quantised_linear(x[-rows:], panels), alone[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_with_fused_additions_gives_the_same_bits(kind: str) -> None:
    panels, x = Panels.pack(kind, blocks_of(kind, 37, 512), 512), torch.randn(7, 512)
    before, results = _native.instruction_set(), []
    for name in set(FUSED) & set(_native.instruction_sets()):
        _native.set_instruction_set(name)
        results.append(native.quantised_linear(x, panels))
    _native.set_instruction_set(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_the_number_of_threads_changes_no_bit() -> None:
    panels, x = Panels.pack("Q4_1", blocks_of("Q4_1", 2051, 640), 640), torch.randn(9, 640)
    _native.set_num_threads(1)
    expected = native.quantised_linear(x, panels)
    for threads in (2, 3, 5):
        _native.set_num_threads(threads)
        assert_same_bits(native.quantised_linear(x, panels), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(value: float, instruction_set: str) -> None:
    panels, x = Panels.pack("Q8_0", blocks_of("Q8_0", 20, 64), 64), torch.randn(3, 64)
    expected = native.quantised_linear(x, panels)
    x[1, 40] = value
    result = native.quantised_linear(x, panels)
    assert not result[1].isfinite().any()
    assert_same_bits(result[[0, 2]], expected[[0, 2]])


def test_zeros_give_the_bias() -> None:
    panels, bias = Panels.pack("Q5_0", blocks_of("Q5_0", 20, 64), 64), torch.randn(20)
    assert_same_bits(native.quantised_linear(torch.zeros(2, 64), panels, bias), bias.expand(2, -1))


def test_leading_dimensions_are_kept_and_strides_do_not_matter() -> None:
    panels = Panels.pack("Q4_0", blocks_of("Q4_0", 6, 64), 64)
    for shape in [(64,), (3, 64), (2, 3, 64), (2, 0, 64)]:
        assert native.quantised_linear(torch.randn(shape), panels).shape == (*shape[:-1], 6)
    x = torch.randn(64, 5).T
    assert_same_bits(native.quantised_linear(x, panels), native.quantised_linear(x.contiguous(), panels))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.randn(2, 32)}, r"x: got shape \[2, 32\], expected \[\.\.\., 64\]"),
        ({"x": torch.randn(2, 64).bfloat16()}, "x: got torch.bfloat16, expected torch.float32"),
        ({"bias": torch.randn(5)}, "bias"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    panels = Panels.pack("Q4_0", blocks_of("Q4_0", 6, 64), 64)
    with pytest.raises((ValueError, TypeError), match=message):
        native.quantised_linear(**{"x": torch.randn(2, 64), "panels": panels, **arguments})


def test_blocks_that_are_none_are_refused() -> None:
    blocks = blocks_of("Q4_0", 6, 64)
    with pytest.raises(ValueError, match="kind: got 'Q2_K', expected one of Q4_0"):
        Panels.pack("Q2_K", blocks, 64)
    with pytest.raises(ValueError, match="in_features: got 48, expected a multiple of 32"):
        Panels.pack("Q4_0", blocks, 48)
    with pytest.raises(ValueError, match="blocks: got rows of 36 bytes, expected 40"):
        Panels.pack("Q4_1", blocks, 64)
    with pytest.raises(ValueError, match="order: "):
        Panels.pack("Q4_0", blocks, 64, torch.arange(5))
    with pytest.raises(ValueError, match="order: expected rows of the matrix"):
        Panels.pack("Q4_0", blocks, 64, torch.arange(1, 7))
    with pytest.raises(IndexError, match=r"ids\[1\]: got 6, expected 0 to 5"):
        Panels.pack("Q4_0", blocks, 64).rows(torch.tensor([0, 6]))
