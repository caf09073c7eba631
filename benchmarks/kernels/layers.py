"""The ops of a decoder layer and the linears after the last one; and the inputs of all cases.

Weights and pages have several copies, together larger than a cache, because a step reads all other weights between two
uses of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.shapes import Shape
from tide_core.kernels import CudaKernels, Kernels
from tide_core.kernels.reference import ops as reference

MORE_THAN_CACHE = 2**29
MOST_COPIES = 64
BLOCK = 16
EPS = 1e-5
Call = Callable[[int], object]
"""Takes the number of a copy; returns the result that is compared."""


@dataclass(frozen=True)
class Calls:
    """An op and its reference with their inputs."""

    ours: Call
    reference: Call
    num_bytes: int
    """Bytes that one call must read and write."""
    num_flops: int = 0
    graph_reference: bool = True
    """Whether the reference can run in a CUDA graph."""


class Inputs:
    """Tensors for one implementation of the ops on one device."""

    def __init__(self, kernels: Kernels, device: torch.device, dtype: torch.dtype, *, small: bool = False) -> None:
        self.kernels: Any = kernels  # on a GPU it has more ops than `Kernels`
        self.on_gpu = isinstance(kernels, CudaKernels)
        self.device, self.dtype, self.small = device, dtype, small

    def _pools(self, shape: Shape, rows: int) -> tuple[Tensor, Tensor]:
        size = -(-4 * rows // BLOCK), shape.kv_heads, BLOCK, shape.head_dim
        first, second = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return first, second

    def _supports_joined(self, shape: Shape) -> bool:
        supports: bool = self.kernels.supports_joined(*self._pools(shape, 1))
        return supports

    def _slots(self, rows: int) -> Tensor:
        return torch.randperm(4 * rows, generator=torch.Generator().manual_seed(0))[:rows].to(self.device)

    def _turn(self, rows: int, dim: int) -> tuple[Tensor, Tensor]:
        angles = torch.rand(rows, dim, device=self.device)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _randn(self, *size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.empty(size, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, scale)

    def _copies(self, num_elements: int) -> int:
        return 2 if self.small else max(1, min(MOST_COPIES, MORE_THAN_CACHE // self._bytes(num_elements)))

    def _bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize


class LayerOps(Inputs):
    """Each method makes one op at one size."""

    def _linear(
        self, out: int, inner: int, rows: int, *, residual: bool = False, gated: bool = False, normed: bool = False
    ) -> Calls:
        size = out * (2 if gated else 1)
        weights = [self._randn(size, inner, scale=inner**-0.5) for _ in range(self._copies(size * inner))]
        x, added = self._randn(rows, inner), self._randn(rows, out) if residual else None
        norm = (self._randn(inner), EPS) if normed else None

        def ours(i: int) -> object:
            weight = weights[i % len(weights)]
            if residual or gated or normed:
                return self.kernels.fused_linear(x, weight, residual=added, gated=gated, norm=norm)
            return self.kernels.linear(x, weight)

        return Calls(
            ours,
            lambda i: reference.fused_linear(x, weights[i % len(weights)], None, added, gated, norm),
            self._bytes(size * inner + rows * (inner + out * (1 + residual))),
            2 * rows * size * inner,
        )

    def _rms_norm(self, shape: Shape, rows: int) -> Calls:
        x, weight = self._randn(rows, shape.hidden), self._randn(shape.hidden)
        num_bytes = self._bytes((2 * rows + 1) * shape.hidden)
        return Calls(
            lambda i: self.kernels.rms_norm(x, weight, EPS), lambda i: reference.rms_norm(x, weight, EPS), num_bytes
        )

    def _silu_mul(self, shape: Shape, rows: int) -> Calls:
        gate, up = (self._randn(rows, shape.intermediate) for _ in range(2))
        num_bytes = self._bytes(3 * rows * shape.intermediate)
        return Calls(lambda i: self.kernels.silu_mul(gate, up), lambda i: reference.silu_mul(gate, up), num_bytes)

    def _rotary(self, shape: Shape, rows: int) -> Calls:
        x = self._randn(rows, shape.heads, shape.head_dim)
        turn = self._turn(rows, shape.head_dim)
        num_bytes = self._bytes(2 * x.numel() + 2 * turn[0].numel())
        return Calls(lambda i: self.kernels.rotary(x, *turn), lambda i: reference.rotary(x, *turn), num_bytes)

    def _write_kv(self, shape: Shape, rows: int) -> Calls:
        k, v = (self._randn(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
        ours, plain = self._pools(shape, rows), self._pools(shape, rows)
        slots = self._slots(rows)

        def write(op: Any, pools: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            op(k, v, *pools, slots)
            return pools

        return Calls(
            lambda i: write(self.kernels.write_kv, ours),
            lambda i: write(reference.write_kv, plain),
            self._bytes(4 * k.numel()),
            graph_reference=False,
        )

    def _rotary_write(self, shape: Shape, rows: int) -> Calls:
        heads = shape.heads + 2 * shape.kv_heads
        qkv, turn = self._randn(rows, heads * shape.head_dim), self._turn(rows, shape.head_dim)
        ours, plain = self._pools(shape, rows), self._pools(shape, rows)
        slots = self._slots(rows)

        def write(op: Any, pools: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            return op(qkv, *turn, None, slots, *pools), *pools

        return Calls(
            lambda i: write(self.kernels.rotary_write, ours),
            lambda i: write(reference.rotary_write, plain),
            self._bytes(2 * qkv.numel() + 2 * turn[0].numel()),
            graph_reference=False,
        )

    def _attend(self, shape: Shape, context: int, rows: int) -> Calls:
        """Rows of 1 to 8 queries at the end of their context, over pages in random order."""
        queries = [1 + row % 8 for row in range(rows)]
        copies, (k_pool, v_pool), tables = self._pages(shape, context, rows)
        starts = torch.tensor([0, *queries]).cumsum(0).int().to(self.device)
        lens = torch.full((rows,), context, dtype=torch.int32, device=self.device)
        q = self._randn(sum(queries), shape.heads, shape.head_dim)
        scaling, more = shape.head_dim**-0.5, dict[str, Any]()
        attend = self.kernels.paged_attention
        if self.on_gpu:
            attend = self.kernels.attend
            workspace = self.kernels.attention_workspace(*q.shape, context, self.device)
            more = {"max_queries": max(queries), "max_context": context, "workspace": workspace}
        return Calls(
            lambda i: attend(q, k_pool, v_pool, tables[i % copies], starts, lens, scaling, **more),
            lambda i: reference.paged_attention(q, k_pool, v_pool, tables[i % copies], starts, lens, scaling),
            self._bytes(2 * rows * context * shape.kv_heads * shape.head_dim + 2 * q.numel()),
            graph_reference=False,
        )

    def _attend_joined(self, shape: Shape, context: int, rows: int) -> Calls:
        """Attention from the QKV projection of one token per row; its K and V are written to the last slot."""
        copies, ours, tables = self._pages(shape, context, rows)
        plain = ours[0].clone(), ours[1].clone()
        heads = shape.heads + 2 * shape.kv_heads
        qkv, turn = self._randn(rows, heads * shape.head_dim), self._turn(rows, shape.head_dim)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        lens = torch.full((rows,), context, dtype=torch.int32, device=self.device)
        slots = tables[:, :, -1].long() * BLOCK + (context - 1) % BLOCK
        scaling = shape.head_dim**-0.5
        queries = rows, shape.heads, shape.head_dim
        workspace = self.kernels.attention_workspace(*queries, context, self.device)
        more = {"max_queries": 1, "max_context": context, "workspace": workspace}

        def attend(op: Any, i: int, pools: tuple[Tensor, Tensor], **limits: Any) -> Tensor:
            place = slots[i % copies], *pools, None, None, EPS
            attended: Tensor = op(qkv, *turn, None, *place, tables[i % copies], starts, lens, scaling, **limits)
            return attended

        return Calls(
            lambda i: attend(self.kernels.attend_joined, i, ours, **more),
            lambda i: attend(reference.attend_joined, i, plain),
            self._bytes(2 * rows * context * shape.kv_heads * shape.head_dim + 2 * qkv.numel()),
            graph_reference=False,
        )

    def _pages(self, shape: Shape, context: int, rows: int) -> tuple[int, tuple[Tensor, Tensor], Tensor]:
        """Number of copies of the rows' pages, the pools, and the block tables, [copies, R, B]."""
        blocks = -(-context // BLOCK)
        page = BLOCK * shape.kv_heads * shape.head_dim
        copies = self._copies(2 * rows * blocks * page)
        size = copies * rows * blocks, shape.kv_heads, BLOCK, shape.head_dim
        order = torch.randperm(copies * rows * blocks, generator=torch.Generator().manual_seed(0))
        tables = order.int().view(copies, rows, blocks).to(self.device)
        return copies, (self._randn(*size), self._randn(*size)), tables
