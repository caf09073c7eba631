"""Weights in 8 bits: what number each is, and that parts and sums of matrices keep it."""

from __future__ import annotations

import pytest
import torch

from tide_core.kernels.fp8 import FP8, Fp8Weight, joined, quantised_by_row

pytestmark = pytest.mark.unit


def random_weight(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-size // each) for size, each in zip((rows, columns), block, strict=True)]
    values = (torch.randn(rows, columns, generator=generator) * 50).to(FP8)
    return Fp8Weight(values, torch.rand(*blocks, generator=generator) + 0.01, *block)


@pytest.mark.parametrize("block", [(1, 200), (128, 128), (300, 200)])
def test_each_number_is_its_value_times_the_scale_of_its_block_rounded_once(block: tuple[int, int]) -> None:
    weight = random_weight(300, 200, block)
    wide = weight.dequantised(torch.bfloat16)
    for row, column in ((0, 0), (127, 128), (128, 127), (299, 199)):
        scale = weight.scales[row // block[0], column // block[1]]
        assert wide[row, column] == (weight.values[row, column].float() * scale).bfloat16()


def test_a_matrix_is_quantised_to_the_nearest_number_of_its_row() -> None:
    wide = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 7)[:, None]
    wide[3] = 0
    again = quantised_by_row(wide).dequantised(torch.float32)
    largest = wide.abs().amax(dim=1, keepdim=True)
    error = (again - wide).abs()
    assert torch.equal(again[3], wide[3])
    scales = quantised_by_row(wide).scales
    assert torch.equal(scales, scales.bfloat16().float())
    assert torch.allclose(scales[largest > 0] * 448, largest[largest > 0], rtol=2**-8), "the largest of a row stays"
    # Three bits of mantissa: at most 1/16 of the number, or half a step of the smallest numbers.
    assert bool((error <= torch.maximum(wide.abs() / 16, largest / 448 * 2**-10) * 1.01).all())


def test_rows_and_joined_matrices_keep_their_numbers() -> None:
    upper, lower = random_weight(256, 200, (128, 128)), random_weight(100, 200, (128, 128), seed=1)
    whole = joined([upper, lower])
    assert whole is not None
    expected = torch.cat([upper.dequantised(torch.float32), lower.dequantised(torch.float32)])
    assert torch.equal(whole.dequantised(torch.float32), expected)
    assert torch.equal(whole.rows(128, 356).dequantised(torch.float32), expected[128:])
    assert joined([lower, upper]) is None, "a block would be cut"
    assert joined([upper, quantised_by_row(torch.ones(1, 200))]) is None, "blocks differ"
    with pytest.raises(ValueError, match="cut a block of 128 rows"):
        whole.rows(100, 356)


def test_scales_that_do_not_fit_are_refused() -> None:
    weight = random_weight(256, 200, (128, 128))
    with pytest.raises(ValueError, match=r"got scales \[2, 2\]; expected \[256, 1\]"):
        Fp8Weight(weight.values, weight.scales, 1, 200)
    with pytest.raises(ValueError, match="expected a matrix in torch"):
        Fp8Weight(torch.ones(256, 200), weight.scales, 128, 128)
