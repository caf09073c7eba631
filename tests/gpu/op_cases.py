"""CUDA ops that work row by row, in one form, so that one test can ask the same of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.kernel_cases import TOLERANCES
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.ops import RouterWeights, Top2

DEVICE = "cuda"
TABLE_ROWS = 50


@dataclass(frozen=True)
class RowOp:
    """Its weights are inside; `inputs` and `results` are made for a number of rows, with the rows first."""

    inputs: Callable[[int], list[Tensor]]
    results: Callable[[int], list[Tensor]]
    run: Callable[[Sequence[Tensor], Sequence[Tensor]], object]
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    tolerance: dict[str, float] | None = None
    exact: bool = False

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = self.results(len(inputs[0]))
        self.run(inputs, results)
        return results


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def indices(rows: int, limit: int = TABLE_ROWS) -> Tensor:
    return torch.randint(0, limit, (rows,), device=DEVICE)


def linear(
    dtype: torch.dtype,
    out: int,
    inner: int,
    *,
    bias: bool = False,
    residual: bool = False,
    gated: bool = False,
    normed: bool = False,
) -> RowOp:
    norm = (randn(inner, dtype=dtype), 1e-5) if normed else None
    weight = randn(out * (2 if gated else 1), inner, dtype=dtype, scale=inner**-0.5)
    added = randn(weight.shape[0], dtype=dtype) if bias else None

    def inputs(rows: int) -> list[Tensor]:
        x = [randn(rows, inner, dtype=dtype)]
        return [*x, randn(rows, out, dtype=dtype)] if residual else x

    def run(given: Sequence[Tensor], results: Sequence[Tensor]) -> object:
        more = given[1] if residual else None
        around = {"residual": more, "norm": norm}
        return cuda.linear(given[0], weight, added, gated=gated, out=results[0], **around)

    def expected(given: Sequence[Tensor]) -> list[Tensor]:
        x = given[0].float()
        x = x if norm is None else reference.rms_norm(x, norm[0].float(), norm[1])  # the roundings are ours alone
        wide = reference.linear(x, weight.float(), None if added is None else added.float())
        y = wide.to(dtype)
        y = reference.silu_mul(*y.chunk(2, dim=-1)) if gated else y
        return [given[1] + y if residual else y]

    return RowOp(inputs, lambda rows: [empty(rows, out, dtype=dtype)], run, expected)


def rms_norm(dtype: torch.dtype, width: int) -> RowOp:
    weight = randn(width, dtype=dtype)
    return RowOp(
        lambda rows: [randn(rows, width, dtype=dtype, scale=5.0)],
        lambda rows: [empty(rows, width, dtype=dtype)],
        lambda given, results: cuda.rms_norm(given[0], weight, 1e-5, out=results[0]),
        lambda given: [reference.rms_norm(given[0], weight, 1e-5)],
    )


def silu_mul(dtype: torch.dtype, width: int) -> RowOp:
    return RowOp(
        lambda rows: [randn(rows, width, dtype=dtype, scale=3.0), randn(rows, width, dtype=dtype)],
        lambda rows: [empty(rows, width, dtype=dtype)],
        lambda given, results: cuda.silu_mul(*given, out=results[0]),
        lambda given: [reference.silu_mul(*given)],
    )


def rotary(dtype: torch.dtype, heads: int, dim: int) -> RowOp:
    return RowOp(
        lambda rows: [randn(rows, heads, dim, dtype=dtype), *(randn(rows, dim, dtype=dtype) for _ in range(2))],
        lambda rows: [empty(rows, heads, dim, dtype=dtype)],
        lambda given, results: cuda.rotary(*given, out=results[0]),
        lambda given: [reference.rotary(*given)],
        exact=True,
    )


def top2_logsumexp(dtype: torch.dtype, width: int) -> RowOp:
    def results(rows: int) -> list[Tensor]:
        dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
        return [empty(rows, dtype=one) for one in dtypes]

    return RowOp(
        lambda rows: [randn(rows, width, dtype=dtype, scale=3.0)],
        results,
        lambda given, results: cuda.top2_logsumexp(given[0], out=Top2(*results)),
        lambda given: reference.top2_logsumexp(given[0]),
    )


def router(dtype: torch.dtype, width: int, bottleneck: int) -> RowOp:
    weights = RouterWeights(
        randn(width, dtype=torch.float32),
        randn(bottleneck, width + 2, dtype=torch.float32, scale=width**-0.5),
        randn(bottleneck, dtype=torch.float32),
        randn(bottleneck, dtype=torch.float32, scale=bottleneck**-0.5),
        randn(1, dtype=torch.float32),
        1e-5,
    )

    def inputs(rows: int) -> list[Tensor]:
        rand = [torch.rand(rows, device=DEVICE) for _ in range(3)]
        return [randn(rows, width, dtype=dtype, scale=9.0), rand[0] + 3, rand[1], rand[2] + 1]

    def run(given: Sequence[Tensor], results: Sequence[Tensor]) -> object:
        features, best, second, total = given
        return cuda.router(features, Top2(best, best, second, total), weights, out=results[0])

    return RowOp(
        inputs,
        lambda rows: [empty(rows, dtype=torch.float32)],
        run,
        lambda given: [reference.router(given[0], Top2(given[1], given[1], given[2], given[3]), weights)],
        # The confidence is rounded to the features' type, and a logarithm may differ in its last bit.
        TOLERANCES[torch.float32] if dtype is torch.float32 else {"rtol": 0.0, "atol": 4e-3},
    )


def embed(dtype: torch.dtype, width: int) -> RowOp:
    table = randn(TABLE_ROWS, width, dtype=dtype)
    return RowOp(
        lambda rows: [indices(rows)],
        lambda rows: [empty(rows, width, dtype=dtype)],
        lambda given, results: cuda.embed(given[0], table, out=results[0]),
        lambda given: [table[given[0]]],
        exact=True,
    )


def exit_input(dtype: torch.dtype, width: int) -> RowOp:
    deep, table = randn(TABLE_ROWS, width, dtype=dtype, scale=5.0), randn(6, 2 * width, dtype=dtype)
    norms = randn(width, dtype=dtype), randn(width, dtype=dtype)

    def inputs(rows: int) -> list[Tensor]:
        return [randn(rows, width, dtype=dtype, scale=5.0), indices(rows), indices(rows, 9)]

    def arguments(given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        states, slots, distances = given
        return states, norms[0], deep, slots, norms[1], distances, table, 1e-5

    return RowOp(
        inputs,
        lambda rows: [empty(rows, 2 * width, dtype=dtype)],
        lambda given, results: cuda.exit_input(*arguments(given), out=results[0]),
        lambda given: [reference.exit_input(*arguments(given))],
    )


ROW_OPS: dict[str, Callable[[torch.dtype], RowOp]] = {
    "linear 5 of 7": lambda dtype: linear(dtype, 5, 7, bias=True),
    "linear 100 of 72": lambda dtype: linear(dtype, 100, 72),
    "linear 100 of 72, normed": lambda dtype: linear(dtype, 100, 72, normed=True),
    "linear 960 of 576": lambda dtype: linear(dtype, 960, 576),
    "linear 1001 of 1536, bias, residual": lambda dtype: linear(dtype, 1001, 1536, bias=True, residual=True),
    "linear 4096 of 4096, residual": lambda dtype: linear(dtype, 4096, 4096, residual=True),
    "linear 1536 of 576, gated": lambda dtype: linear(dtype, 1536, 576, gated=True),
    "linear 33 of 100, gated, bias": lambda dtype: linear(dtype, 33, 100, gated=True, bias=True),
    "linear 5 of 7, normed": lambda dtype: linear(dtype, 5, 7, bias=True, normed=True),
    "linear 960 of 576, normed": lambda dtype: linear(dtype, 960, 576, normed=True),
    "linear 6144 of 4096, normed": lambda dtype: linear(dtype, 6144, 4096, normed=True),
    "linear 1536 of 576, gated, normed": lambda dtype: linear(dtype, 1536, 576, gated=True, normed=True),
    "linear 1001 of 1544, everything": lambda dtype: linear(
        dtype, 1001, 1544, bias=True, residual=True, gated=True, normed=True
    ),
    "rms_norm 7": lambda dtype: rms_norm(dtype, 7),
    "rms_norm 576": lambda dtype: rms_norm(dtype, 576),
    "rms_norm 4096": lambda dtype: rms_norm(dtype, 4096),
    "rms_norm 9001": lambda dtype: rms_norm(dtype, 9001),
    "silu_mul 7": lambda dtype: silu_mul(dtype, 7),
    "silu_mul 1536": lambda dtype: silu_mul(dtype, 1536),
    "silu_mul 14336": lambda dtype: silu_mul(dtype, 14336),
    "rotary 4 of 64": lambda dtype: rotary(dtype, 4, 64),
    "rotary 3 of 6": lambda dtype: rotary(dtype, 3, 6),
    "rotary 2 of 256": lambda dtype: rotary(dtype, 2, 256),
    "top2_logsumexp 1": lambda dtype: top2_logsumexp(dtype, 1),
    "top2_logsumexp 7": lambda dtype: top2_logsumexp(dtype, 7),
    "top2_logsumexp 2048": lambda dtype: top2_logsumexp(dtype, 2048),
    "top2_logsumexp 2049": lambda dtype: top2_logsumexp(dtype, 2049),
    "top2_logsumexp 128256": lambda dtype: top2_logsumexp(dtype, 128256),
    "router 1 of 1": lambda dtype: router(dtype, 1, 1),
    "router 5 of 33": lambda dtype: router(dtype, 33, 5),
    "router 128 of 576": lambda dtype: router(dtype, 576, 128),
    "router 128 of 4096": lambda dtype: router(dtype, 4096, 128),
    "embed 3": lambda dtype: embed(dtype, 3),
    "embed 576": lambda dtype: embed(dtype, 576),
    "exit_input 7": lambda dtype: exit_input(dtype, 7),
    "exit_input 576": lambda dtype: exit_input(dtype, 576),
    "exit_input 4096": lambda dtype: exit_input(dtype, 4096),
}
NARROW = [
    "linear 5 of 7",
    "linear 33 of 100, gated, bias",
    "rms_norm 7",
    "silu_mul 7",
    "rotary 3 of 6",
    "top2_logsumexp 7",
    "router 5 of 33",
    "embed 3",
    "exit_input 7",
]


def assert_right(op: RowOp, results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        if op.exact or not wanted.is_floating_point():
            assert torch.equal(result, wanted)
        else:
            torch.testing.assert_close(result, wanted, **(op.tolerance or TOLERANCES[wanted.dtype]))


def assert_same(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit."""
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
