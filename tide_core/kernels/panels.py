"""A block-quantised matrix as the native kernels read it: its numbers are those of the file, in another order.

csrc/cpu/kernels/panels.h describes the layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Block formats of GGUF files, in the order of `PanelKind`."""
SMALL_BLOCK, LARGE_BLOCK = 32, 256
STEP = 32
"""Neighbours of x that share a scale."""


class NotFiniteError(ValueError):
    """A matrix holds NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix [out_features, in_features]."""

    kind: str
    out_features: int
    in_features: int
    data: Tensor

    @classmethod
    def pack(cls, kind: str, blocks: Tensor, in_features: int, order: Tensor | None = None) -> Panels:
        """From the rows of a file, uint8 [N, bytes]. Output i is row `order[i]`, or row i. Raises NotFiniteError."""
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
        size = LARGE_BLOCK if kind.endswith("_K") else SMALL_BLOCK
        if blocks.dtype is not torch.uint8 or blocks.dim() != 2 or not blocks.is_contiguous() or not blocks.is_cpu:
            raise ValueError("blocks: expected contiguous uint8 [N, bytes] on the CPU")
        if in_features < 1 or in_features % size:
            raise ValueError(f"in_features: got {in_features}, expected a multiple of {size} ({kind})")
        num_rows, num_bytes = blocks.shape
        native = _native()
        expected = in_features // size * native.block_bytes(KINDS.index(kind))
        if num_bytes != expected:
            raise ValueError(f"blocks: got rows of {num_bytes} bytes, expected {expected}")
        if order is not None and (order.dtype is not torch.int64 or order.shape != (num_rows,)):
            raise ValueError(f"order: got {order.dtype} {list(order.shape)}, expected int64 [{num_rows}]")
        panels = cls.empty(kind, num_rows, in_features)
        address = 0 if order is None else order.contiguous().data_ptr()
        data = panels.data.data_ptr()
        if not native.pack_panels(panels.code, blocks.data_ptr(), address, in_features, num_rows, data):
            raise NotFiniteError("blocks: got NaN or infinity, expected finite numbers")
        return panels

    @classmethod
    def empty(cls, kind: str, out_features: int, in_features: int, device: str = "cpu") -> Panels:
        """Memory for the numbers, or on the meta device their size alone."""
        num_bytes = _native().panels_bytes(KINDS.index(kind), in_features, out_features)
        return cls(kind, out_features, in_features, torch.empty(num_bytes, dtype=torch.uint8, device=device))

    @property
    def code(self) -> int:
        return KINDS.index(self.kind)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] as float32 [n, in_features], each number as the file's format defines it."""
        ids = ids.to("cpu", torch.int64).contiguous()
        rows = torch.empty(len(ids), self.in_features)
        _native().unpack_rows(
            self.code,
            self.data.data_ptr(),
            self.in_features,
            self.out_features,
            ids.data_ptr(),
            len(ids),
            rows.data_ptr(),
        )
        return rows

    def whole(self) -> Tensor:
        return self.rows(torch.arange(self.out_features))

    def values(self, places: Sequence[int]) -> Tensor:
        """The numbers at these places of the flattened matrix."""
        at = torch.tensor(places)
        rows = self.rows(at // self.in_features)
        return rows[torch.arange(len(at)), at % self.in_features]


def _native() -> Any:
    return importlib.import_module("tide_core.kernels._native")
