"""What the cases of `kernels.py` are made of: an op's calls, and tensors for them.

Weights and pages come in several copies, more than a cache holds together, because between two uses of one a step
reads all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_shapes import Shape
from tide_core.kernels import CudaKernels, Kernels

MORE_THAN_CACHE = 2**29
MOST_COPIES = 64
BLOCK = 16
EPS = 1e-5
Call = Callable[[int], object]
"""With the number of a copy; gives what is compared."""


@dataclass(frozen=True)
class Calls:
    """A case, ready to be timed."""

    ours: Call
    reference: Call
    num_bytes: int
    """Of one call, as if each were read or written once."""
    num_flops: int = 0
    captured_reference: bool = True
    """Whether the reference asks the host nothing and can run in a graph as well."""


class Inputs:
    """Tensors for one version of the ops on one device."""

    def __init__(self, kernels: Kernels, device: torch.device, dtype: torch.dtype, *, small: bool = False) -> None:
        self.kernels: Any = kernels  # more than `Kernels` on a GPU
        self.on_gpu = isinstance(kernels, CudaKernels)
        self.device, self.dtype, self.small = device, dtype, small

    def _pools(self, shape: Shape, rows: int) -> tuple[Tensor, Tensor]:
        size = -(-4 * rows // BLOCK), shape.kv_heads, BLOCK, shape.head_dim
        first, second = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return first, second

    def _takes_joined(self, shape: Shape) -> bool:
        takes: bool = self.kernels.takes_joined(*self._pools(shape, 1))
        return takes

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
