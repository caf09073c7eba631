"""Linears of weights in 8 bits give the bits of the linears of half width on the widened matrix, whatever the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.op_cases import DEVICE, assert_same, randn
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.cuda.fp8 import packed, widen_fp8
from tide_core.kernels.cuda.launch import reads_fp8
from tide_core.kernels.fp8 import FP8, Fp8Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
]
BF16 = torch.bfloat16
MOST = 300
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128, 129, 160, 192, 193, 256, 257, MOST)
BY_ROW, BY_BLOCK = (1, 0), (128, 128)


@dataclass(frozen=True)
class Linear:
    """A linear at one size. Columns of a block: 0 means all."""

    out: int
    inner: int
    block: tuple[int, int] = BY_ROW
    gated: bool = False
    bias: bool = False
    residual: bool = False
    normed: bool = False
    dealt: bool = False  # scales in bfloat16

    def weight(self, seed: int = 0) -> Fp8Weight:
        made = random_weight(self.out * (2 if self.gated else 1), self.inner, self.block, seed)
        return replace(made, scales=made.scales.bfloat16().float()) if self.dealt else made

    def more(self, rows: int) -> dict[str, Any]:
        return {
            "bias": randn(self.out * (2 if self.gated else 1), dtype=BF16) if self.bias else None,
            "gated": self.gated,
            "residual": randn(rows, self.out, dtype=BF16) if self.residual else None,
            "norm": (randn(self.inner, dtype=BF16), 1e-5) if self.normed else None,
        }


LINEARS = {
    "qkv of 8B": Linear(6144, 4096, bias=True),
    "qkv of 8B, blocks": Linear(6144, 4096, BY_BLOCK),
    "o of 8B, blocks, residual": Linear(4096, 4096, BY_BLOCK, residual=True),
    "gate and up of 8B": Linear(14336, 4096, gated=True),
    "gate and up of 8B, blocks": Linear(14336, 4096, BY_BLOCK, gated=True),
    "down of 8B, residual": Linear(4096, 14336, residual=True),
    "down of 8B, blocks": Linear(4096, 14336, BY_BLOCK, residual=True),
    "keys and values of 8B": Linear(2048, 4096, BY_BLOCK),
    "10240 of 4096": Linear(10240, 4096),
    "10240 of 4096, blocks, residual": Linear(10240, 4096, BY_BLOCK, residual=True),
    "12770 of 1040, blocks, bias": Linear(12770, 1040, BY_BLOCK, bias=True),
    "4610 of 1168, residual": Linear(4610, 1168, residual=True),
    "tall, as an LM head": Linear(70000, 528),
    "tall and gated, blocks, everything": Linear(20000, 2064, BY_BLOCK, gated=True, bias=True, residual=True),
    "5001 of 3600, blocks, bias": Linear(5001, 3600, BY_BLOCK, bias=True),
    "5001 of 3600, blocks of 100 rows": Linear(5001, 3600, (100, 64), residual=True),
    "960 of 576": Linear(960, 576),
    "960 of 576, normed": Linear(960, 576, normed=True),
    "1536 of 576, gated, normed, blocks": Linear(1536, 576, BY_BLOCK, gated=True, normed=True),
    "576 of 1536, residual, blocks": Linear(576, 1536, BY_BLOCK, residual=True),
    "8192 of 1024, normed": Linear(8192, 1024, normed=True),
    "4000 of 2048, normed, gated, everything": Linear(
        4000, 2048, BY_BLOCK, gated=True, bias=True, residual=True, normed=True
    ),
    "333 of 80, blocks, bias, normed": Linear(333, 80, BY_BLOCK, bias=True, normed=True),
    "104 of 592, gated": Linear(104, 592, gated=True, residual=True),
    "5 of 16": Linear(5, 16, bias=True),
    "203 of 1168, blocks of all rows": Linear(203, 1168, (406, 128), gated=True),
}
LINEARS |= {f"{name}, dealt": replace(one, dealt=True) for name, one in LINEARS.items() if "tall" not in name}
EVERY_LINEAR = pytest.mark.parametrize("name", LINEARS)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def random_weight(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> Fp8Weight:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    block = block[0], block[1] or columns
    blocks = [-(-size // each) for size, each in zip((rows, columns), block, strict=True)]
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE, generator=generator)
    codes[codes & 0x7F == 0x7F] = 0x3C  # no number
    scales = torch.rand(*blocks, device=DEVICE, generator=generator) + 0.1
    return Fp8Weight(codes.view(FP8), scales * (columns**-0.5 / 100), *block)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def cut(more: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    residual = more["residual"]
    return {**more, "residual": None if residual is None else residual[first:last].clone()}


@EVERY_LINEAR
def test_every_number_of_rows_has_the_bits_of_the_widened_matrix(name: str) -> None:
    one = LINEARS[name]
    weight = one.weight()
    wide, narrow = weight.dequantised(BF16), packed(weight)
    x, more = randn(MOST, one.inner, dtype=BF16), one.more(MOST)
    for count in COUNTS:
        for first, last in ((0, count), (MOST - count, MOST)):
            rows = x[first:last].clone()
            expected = cuda.linear(rows, wide, **cut(more, first, last))
            assert torch.equal(bits(cuda.linear(rows, narrow, **cut(more, first, last))), bits(expected)), count


@EVERY_LINEAR
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    one = LINEARS[name]
    narrow = packed(one.weight())
    x, more = randn(MOST, one.inner, dtype=BF16), one.more(MOST)
    whole = cuda.linear(x, narrow, **more)
    for first, last in ((0, 1), (13, 14), (3, 11), (40, 57), (100, 133), (200, 265), (299, 300)):
        part = cuda.linear(x[first:last].clone(), narrow, **cut(more, first, last))
        assert_same([part], [whole[first:last]])


@EVERY_LINEAR
def test_rows_past_those_given_are_neither_read_nor_written(name: str) -> None:
    one = LINEARS[name]
    narrow = packed(one.weight())
    x, more = randn(140, one.inner, dtype=BF16), one.more(140)
    for count in (0, 1, 9, 20, 33, 130):
        given, out = x.clone(), torch.full((140, one.out), 77.0, dtype=BF16, device=DEVICE)
        given[count:] = torch.nan
        cuda.linear(given[:count], narrow, **cut(more, 0, count), out=out[:count])
        assert bool((out[count:] == 77).all())
        if count:
            assert_same([out[:count]], [cuda.linear(x[:count].clone(), narrow, **cut(more, 0, count))])


@pytest.mark.parametrize("rows", [1, 6, 12, 20, 40, 256])
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-125, 3e-38, 1e-30, 0.0123, 1.0, 1000.7, 2.0**100])
def test_every_number_of_8_bits_is_read(scale: float, rows: int) -> None:
    """Also those whose product with the scale is subnormal. One product in each sum: nothing else is added to it."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    codes = torch.cat([codes, codes[:2]])
    values = torch.stack([codes.roll(shift) for shift in range(len(codes))])
    for block, in_bfloat16 in itertools.product((BY_ROW, (64, 64)), (False, True)):
        size = (256, 1) if block == BY_ROW else (4, 4)
        scales = torch.full(size, scale, device=DEVICE) * (1 + torch.rand(size, device=DEVICE))
        scales = scales.bfloat16().float() if in_bfloat16 else scales
        weight = Fp8Weight(values.view(FP8), scales, block[0], block[1] or 256)
        assert packed(weight).dealt == (in_bfloat16 and 2.0**-126 <= scale < 64)
        wide, narrow = weight.dequantised(BF16), packed(weight)
        assert torch.equal(bits(widen_fp8(narrow)), bits(wide))
        x = torch.eye(256, dtype=BF16, device=DEVICE)[-rows:].clone()
        assert torch.equal(bits(cuda.linear(x, narrow)), bits(cuda.linear(x, wide)))
        if scale > 1e-30:
            assert torch.equal(cuda.linear(x, narrow), wide[:, -rows:].T)


@EVERY_LINEAR
def test_a_widened_matrix_has_the_numbers_of_the_one_rule(name: str) -> None:
    weight = LINEARS[name].weight()
    narrow = packed(weight)
    assert torch.equal(bits(widen_fp8(narrow)), bits(weight.dequantised(BF16)))
    assert torch.equal(bits(narrow.dequantised(BF16)), bits(weight.dequantised(BF16)))


@EVERY_LINEAR
def test_a_prompt_gets_the_bits_of_the_widened_matrix(name: str) -> None:
    one = LINEARS[name]
    weight = one.weight()
    wide, narrow = weight.dequantised(BF16), packed(weight)
    x, more = randn(700, one.inner, dtype=BF16), one.more(700)
    assert_same([cuda.linear_of_any(x, narrow)], [cuda.linear_of_any(x, wide)])
    assert_same([cuda.fused_linear_of_any(x, narrow, **more)], [cuda.fused_linear_of_any(x, wide, **more)])


def test_rows_of_a_matrix_and_joined_matrices_have_their_own_bits() -> None:
    weight = Linear(6144, 4096, BY_BLOCK).weight()
    wide, narrow = weight.dequantised(BF16), packed(weight)
    for rows in (1, 12, 100):
        x = randn(rows, 4096, dtype=BF16)
        assert_same([cuda.linear(x, narrow.rows(4096, 6144))], [cuda.linear(x, wide[4096:].contiguous())])


@pytest.mark.parametrize("rows", [1, 12, 64, 200])
def test_linears_in_a_graph_follow_their_inputs(rows: int) -> None:
    layers = [Linear(4096, 4096, BY_BLOCK).weight(seed) for seed in range(6)]
    narrow, wide = [packed(each) for each in layers], [each.dequantised(BF16) for each in layers]

    def run(x: Tensor, weights: Sequence[Tensor | Fp8Weight]) -> Tensor:
        for weight in weights:
            x = cuda.linear(x, weight, residual=x)
        return x

    x = randn(rows, 4096, dtype=BF16)
    run(x, narrow)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, narrow)
    for _ in range(3):
        x.copy_(randn(rows, 4096, dtype=BF16))
        graph.replay()
        assert_same([y], [run(x, wide)])


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_matrix_that_was_just_widened_is_read_as_it_is_now(rows: int) -> None:
    """In a graph a linear reads its weight before the kernels before it have ended, but for the one that wrote it. All
    matrices take turns in one buffer."""
    weights = [Linear(4096, 4096).weight(seed) for seed in range(5)]
    narrow = [packed(each) for each in weights]
    x, buffer = randn(rows, 4096, dtype=BF16), torch.zeros(4096, 4096, dtype=BF16, device=DEVICE)
    expected = [cuda.linear(x, each.dequantised(BF16)) for each in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [cuda.linear(x, widen_fp8(narrow[i % 5], out=buffer)) for i in range(40)]
    for _ in range(5):
        for one in results:
            one.zero_()
        graph.replay()
        for i, one in enumerate(results):
            assert_same([one], [expected[i % 5]])


def test_prompts_that_torch_multiplies_widen_one_matrix_after_another() -> None:
    weights = [Linear(1024, 1024, BY_BLOCK).weight(seed) for seed in range(4)]
    narrow = [packed(each) for each in weights]
    x = randn(500, 1024, dtype=BF16)
    expected = [cuda.linear_of_any(x, each.dequantised(BF16)) for each in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [cuda.linear_of_any(x, narrow[i % 4]) for i in range(12)]
    for _ in range(3):
        graph.replay()
        for i, one in enumerate(results):
            assert_same([one], [expected[i % 4]])


def test_with_given_results_nothing_is_allocated() -> None:
    if not reads_fp8(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this build widens")
    narrow = packed(Linear(4096, 4096, BY_BLOCK).weight())
    x, out = randn(40, 4096, dtype=BF16), torch.empty(40, 4096, dtype=BF16, device=DEVICE)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for count in (1, 6, 12, 40):
        cuda.linear(x[:count], narrow, out=out[:count])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, 6, 11, 20, 40])
@pytest.mark.parametrize(
    "one",
    [
        Linear(100, 80, BY_BLOCK, bias=True),
        Linear(72, 592, gated=True, residual=True, normed=True),
        Linear(1300, 3408, BY_BLOCK, bias=True),  # just large enough for the kernel of many rows on an H200
        Linear(656, 6832, BY_BLOCK, gated=True),
        Linear(656, 6832, gated=True, dealt=True),
        Linear(1300, 3408, BY_BLOCK, residual=True, dealt=True),
        Linear(12770, 1040, BY_BLOCK),  # more CTAs than run at once
        Linear(4610, 1040, residual=True, dealt=True),
        Linear(8520, 1040, bias=True),
    ],
)
def test_a_small_call_is_clean(one: Linear, rows: int) -> None:
    weight = one.weight()
    x, more = randn(rows, one.inner, dtype=BF16), one.more(rows)
    assert_same([cuda.linear(x, packed(weight), **more)], [cuda.linear(x, weight.dequantised(BF16), **more)])
