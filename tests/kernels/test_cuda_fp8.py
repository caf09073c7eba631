"""Linears of weights in 8 bits on a GPU, without one: how matrices are packed, what is refused and what is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.test_fp8 import random_weight
from tide_core.kernels.cuda import fp8 as cuda_fp8
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.fp8 import PACKED, Fp8Weight, joined

pytestmark = pytest.mark.unit
Launches = list[tuple[str, tuple[Any, ...]]]
WIDE = 2 * cuda.WIDEST_NORMED


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The wrappers take CPU tensors for a GPU's that reads 8 bits; what they launch is written down instead."""
    seen: Launches = []
    for module in (cuda, cuda_fp8):
        monkeypatch.setattr(module, "device_of", lambda tensor: tensor.device)
        monkeypatch.setattr(module, "launch", lambda device, op, *arguments, **_: seen.append((op, arguments)))
    monkeypatch.setattr(cuda, "reads_fp8", lambda device: True)
    return seen


def fp8_linear_arguments(**changed: Any) -> dict[str, Any]:
    weight = cuda_fp8.packed(random_weight(4, 32, (1, 32)))
    bias = torch.zeros(4).bfloat16()
    return {"x": torch.zeros(2, 32).bfloat16(), "weight": weight, "bias": bias, **changed}


def widen_fp8_arguments(**changed: Any) -> dict[str, Any]:
    return {"weight": cuda_fp8.packed(random_weight(4, 32, (128, 128))), **changed}


FP8_OPS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "fp8_linear": (cuda_fp8.fp8_linear, fp8_linear_arguments),
    "widen_fp8": (cuda_fp8.widen_fp8, widen_fp8_arguments),
}


@pytest.mark.parametrize("block", [(1, 208), (128, 128), (300, 208)])
def test_packing_moves_columns_within_16_and_changes_no_number(block: tuple[int, int]) -> None:
    weight = random_weight(300, 208, block)
    packed = cuda_fp8.packed(weight)
    assert packed.packed
    assert not weight.packed
    assert sorted(PACKED) == list(range(16))
    raw, moved = weight.values.view(torch.uint8), packed.values.view(torch.uint8)
    for first in (0, 16, 192):
        for place, column in enumerate(PACKED):
            assert torch.equal(moved[:, first + place], raw[:, first + column])
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(packed.dequantised(dtype), weight.dequantised(dtype))
    assert cuda_fp8.packed(packed) is packed


def in_bfloat16(weight: Fp8Weight) -> Fp8Weight:
    return dataclasses.replace(weight, scales=weight.scales.bfloat16().float())


@pytest.mark.parametrize("block", [(1, 208), (128, 128)])
def test_bits_are_dealt_out_where_all_scales_are_in_bfloat16(block: tuple[int, int]) -> None:
    """In every half of a word the numbers of two columns: a mask leaves the first, two shifts and masks the second."""
    weight = in_bfloat16(random_weight(2000, 208, block))
    packed = cuda_fp8.packed(weight)
    assert packed.packed
    assert packed.dealt
    halves = packed.values.view(torch.uint8).view(torch.int16).int() & 0xFFFF
    first, second = halves & 0x87F0, (halves << 4 & 0x80F0) | (halves >> 4 & 0x0700)
    for found, columns in ((first, (0, 1, 2, 3, 4, 5, 6, 7)), (second, (8, 9, 10, 11, 12, 13, 14, 15))):
        numbers = found.to(torch.int16).view(torch.bfloat16).float() * 2.0**120
        for group in range(13):
            expected = weight.values[:, [16 * group + column for column in columns]].float()
            assert torch.equal(numbers[:, 8 * group : 8 * group + 8], expected)
    assert torch.equal(packed.dequantised(torch.float32), weight.dequantised(torch.float32))
    assert torch.equal(packed.rows(128, 2000).dequantised(torch.bfloat16), weight.dequantised(torch.bfloat16)[128:])


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 1.001, 128.0, torch.inf])
def test_a_scale_that_the_one_product_would_not_fit_leaves_whole_bytes(scale: float) -> None:
    weight = in_bfloat16(random_weight(4, 32, (1, 32)))
    weight.scales[2] = scale
    assert not cuda_fp8.packed(weight).dealt
    weight.scales[2] = -(2.0**-126)
    assert cuda_fp8.packed(weight).dealt


def test_matrices_that_are_packed_in_two_ways_are_joined_in_whole_bytes() -> None:
    upper, lower = random_weight(8, 64, (1, 64)), in_bfloat16(random_weight(4, 64, (1, 64), seed=1))
    whole = joined([cuda_fp8.packed(each) for each in (lower, upper)])
    assert whole is not None
    assert whole.packed
    assert not whole.dealt
    expected = torch.cat([each.dequantised(torch.float32) for each in (lower, upper)])
    assert torch.equal(whole.dequantised(torch.float32), expected)


def test_parts_and_sums_of_packed_matrices_are_packed() -> None:
    upper, lower = (random_weight(rows, 64, (128, 128), seed=rows) for rows in (256, 100))
    packed = [cuda_fp8.packed(each) for each in (upper, lower)]
    whole = joined(packed)
    assert whole is not None
    assert whole.packed
    expected = torch.cat([each.dequantised(torch.float32) for each in (upper, lower)])
    assert torch.equal(whole.dequantised(torch.float32), expected)
    assert torch.equal(whole.rows(128, 356).to("cpu").dequantised(torch.float32), expected[128:])
    with pytest.raises(ValueError, match="joined: got packed and other matrices"):
        joined([upper, packed[1]])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (random_weight(4, 24, (1, 24)), "weight: got 24 columns in 8 bits, expected a multiple of 16"),
        (random_weight(4, 256, (128, 32)), "weight: got scales of 32 columns, expected a power of two from 64 on, or"),
        (random_weight(4, 256, (4, 192)), "weight: got scales of 192 columns, expected a power of two from 64 on, or"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_when_it_is_packed(weight: Fp8Weight, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        cuda_fp8.packed(weight)


@pytest.mark.parametrize(
    ("op", "changed", "error", "message"),
    [
        ("fp8_linear", {"x": torch.zeros(2, 32)}, TypeError, "x: got torch.float32, expected torch.bfloat16 with a"),
        ("fp8_linear", {"x": torch.zeros(2, 32).half()}, TypeError, "x: got torch.float16, expected torch.bfloat16"),
        ("fp8_linear", {"x": torch.zeros(2, 16).bfloat16()}, ValueError, r"x: got shape \[2, 16\], expected \[..., 32"),
        ("fp8_linear", {"weight": random_weight(4, 32, (1, 32))}, ValueError, "weight: got columns in their own order"),
        ("fp8_linear", {"bias": torch.zeros(4)}, TypeError, "bias: got torch.float32, expected torch.bfloat16"),
        ("fp8_linear", {"bias": torch.zeros(5).bfloat16()}, ValueError, r"bias: got shape \[5\], expected \[N\] = \[4"),
        ("fp8_linear", {"norm": (torch.zeros(32), 1e-5)}, TypeError, "norm: got torch.float32"),
        ("fp8_linear", {"residual": torch.zeros(2, 3).bfloat16()}, ValueError, r"residual: got shape \[2, 3\]"),
        ("fp8_linear", {"out": torch.zeros(2, 4)}, TypeError, "out: got torch.float32, expected torch.bfloat16"),
        (
            "fp8_linear",
            {"weight": cuda_fp8.packed(random_weight(3, 32, (1, 32))), "bias": None, "gated": True},
            ValueError,
            "weight: .* as of up",
        ),
        ("widen_fp8", {"weight": random_weight(4, 32, (1, 32))}, ValueError, "weight: got columns in their own order"),
        ("widen_fp8", {"out": torch.zeros(4, 32)}, TypeError, "out: got torch.float32, expected torch.bfloat16"),
    ],
)
def test_a_wrapper_names_the_argument_it_refuses(
    launches: Launches, op: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    run, arguments = FP8_OPS[op]
    with pytest.raises(error, match=f"^{message}"):
        run(**arguments(**changed))
    assert launches == []
    run(**arguments())
    assert [name for name, _ in launches] == [op]


@pytest.mark.parametrize(("block", "shift", "stride"), [((1, 256), 31, 1), ((128, 128), 7, 2), ((200, 64), 6, 4)])
def test_the_kernels_are_told_how_the_scales_lie(
    launches: Launches, block: tuple[int, int], shift: int, stride: int
) -> None:
    weight = cuda_fp8.packed(random_weight(400, 256, block))
    cuda.linear(torch.zeros(3, 256).bfloat16(), weight)
    cuda.linear(torch.zeros(3, 256).bfloat16(), weight, gated=True)
    for (op, arguments), columns in zip(launches, (400, 200), strict=True):
        assert op == "fp8_linear"
        assert arguments[1:6] == (weight.values.data_ptr(), weight.scales.data_ptr(), stride, block[0], shift)
        assert arguments[6] is weight.dealt
        assert arguments[11:16] == (3, 256, columns, 256, columns)


def test_states_that_are_not_in_whole_vectors_are_copied(launches: Launches) -> None:
    weight, wide = cuda_fp8.packed(random_weight(4, 32, (1, 32))), torch.zeros(3, 40).bfloat16()
    for x in (wide[:, 8:], wide[:, 1:33], torch.zeros(3, 35).bfloat16()[:, :32]):
        cuda.linear(x, weight)
    assert [arguments[0] % 16 for _, arguments in launches] == [0, 0, 0]
    assert [arguments[14] for _, arguments in launches] == [40, 32, 32]


def test_where_the_device_does_not_read_8_bits_the_matrix_is_widened_first(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "reads_fp8", lambda device: False)
    cuda.linear(**fp8_linear_arguments())
    assert [name for name, _ in launches] == ["widen_fp8", "linear"]
    with pytest.raises(TypeError, match="with a weight in 8 bits"):
        cuda.linear(torch.zeros(2, 32), widen_fp8_arguments()["weight"])


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        (256, 64, ["fp8_linear", "fp8_linear"]),
        (257, 64, ["widen_fp8", "rms_norm", "widen_fp8"]),
        (257, WIDE, ["fp8_linear", "rms_norm", "fp8_linear"]),
    ],
)
def test_rows_that_torch_multiplies_get_the_widened_matrix(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, rows: int, width: int, expected: list[str]
) -> None:
    monkeypatch.setattr(cuda, "fast_for_many_rows", lambda device: True)
    weight, x = cuda_fp8.packed(random_weight(4, width, (1, width))), torch.zeros(rows, width).bfloat16()
    cuda.linear_of_any(x, weight)
    cuda.fused_linear_of_any(x, weight, gated=True, norm=(torch.zeros(width).bfloat16(), 1e-5))
    assert [name for name, _ in launches] == expected
