from __future__ import annotations

import importlib

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.kernels.kernel_cases import DTYPES, assert_near, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (2, 5, 33), (3, 1), (17, 130), (300, 576), (64,)])
def test_native_rms_norm_matches_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    assert_near(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_hugging_face_llama_rms_norm_bit_for_bit(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(80, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 3, 80).to(dtype)
    with torch.no_grad():
        assert_same_bits(reference.rms_norm(x, norm.weight, 1e-6), norm(x))


def test_the_normed_value_is_rounded_before_the_weight_multiplies_it() -> None:
    x = torch.randn(64, 576).to(torch.bfloat16)
    weight = torch.randn(576).to(torch.bfloat16)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    rounded_once = (normed * weight.float()).to(torch.bfloat16)
    y = native.rms_norm(x, weight, 1e-5)
    agreeing = (y == reference.rms_norm(x, weight, 1e-5)).float().mean()
    assert agreeing > 0.999
    assert (y == rounded_once).float().mean() < 0.95


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch() -> None:
    x = torch.randn(200, 577)
    weight = torch.randn(577)
    alone = torch.stack([native.rms_norm(row, weight, 1e-5) for row in x])
    assert_same_bits(native.rms_norm(x, weight, 1e-5), alone)


def test_rows_with_gaps_between_them_are_read_right() -> None:
    x = torch.randn(5, 20)[:, 4:12]
    weight = torch.randn(8)
    assert_near(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
