from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_cases import DTYPES, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


def pools(dtype: torch.dtype, key_dim: int, value_dim: int, blocks: int = 6, heads: int = 3) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(blocks, heads, 16, key_dim).to(dtype),
        torch.randn(blocks, heads, 16, value_dim).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (20, 20), (7, 5), (128, 64)])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_native_write_matches_the_reference(dtype: torch.dtype, key_dim: int, value_dim: int, tokens: int) -> None:
    # As Hugging Face hands them over: [1, heads, T, D], whose transpose has free strides on T and heads.
    k = torch.randn(1, 3, tokens, key_dim).to(dtype).transpose(1, 2)[0]
    v = torch.randn(1, 3, tokens, value_dim).to(dtype).transpose(1, 2)[0]
    slots = torch.randperm(96)[:tokens]
    slots[1::4] = -1
    k_pool, v_pool = pools(dtype, key_dim, value_dim)
    k_expected, v_expected = k_pool.clone(), v_pool.clone()
    reference.write_kv(k, v, k_expected, v_expected, slots)
    native.write_kv(k, v, k_pool, v_pool, slots)
    assert_same_bits(k_pool, k_expected)
    assert_same_bits(v_pool, v_expected)


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_a_slot_is_block_times_size_plus_offset_and_negative_slots_write_nothing(ops: str) -> None:
    write_kv = {"reference": reference, "native": native}[ops].write_kv
    k_pool, v_pool = torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8)
    k = torch.ones(3, 2, 8) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    write_kv(k, -k, k_pool, v_pool, torch.tensor([2 * 16 + 5, -1, 15]))
    assert (k_pool[2, :, 5] == 1).all()
    assert (k_pool[0, :, 15] == 3).all()
    assert (v_pool[2, :, 5] == -1).all()
    assert k_pool.count_nonzero() == v_pool.count_nonzero() == 2 * 2 * 8


def test_a_slot_outside_the_pool_is_refused_before_anything_is_written() -> None:
    k_pool, v_pool = torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8)
    k = torch.ones(2, 2, 8)
    with pytest.raises(IndexError, match=r"slots\[1\]: got 64, expected less than the pool's 64 slots"):
        native.write_kv(k, k, k_pool, v_pool, torch.tensor([3, 64]))
    assert k_pool.count_nonzero() == v_pool.count_nonzero() == 0
