"""Weights in 8 bits (E4M3) with scales in float32, and the one rule of what number each of them is.

The weight a linear multiplies with is `dtype(float32(value) · scale)`: the product in float32, then one rounding to the
type of the states. Whoever reads 8 bits (a kernel, in registers) and whoever widens the matrix first so multiply with
the same numbers, and their results may be compared bit by bit.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of an E4M3 number."""
PACKED = tuple(column for t in range(4) for column in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9))
"""Columns of a packed matrix as they lie, in every 16: a GPU reads the four that it multiplies together as one word."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix `values` [N, K] in E4M3. `scales` [rows, columns] in float32: one for each block of `block_rows` rows
    and `block_columns` columns, of which the last may be cut short. A scale for each row is (1, K). `packed`: the
    columns lie in the order of `PACKED`; numbers, shape and scales are those of the columns in their own order."""

    values: Tensor
    scales: Tensor
    block_rows: int
    block_columns: int
    packed: bool = False

    def __post_init__(self) -> None:
        if self.values.dtype is not FP8 or self.values.dim() != 2 or self.scales.dtype is not torch.float32:
            kinds = f"{self.values.dtype} {list(self.values.shape)} and {self.scales.dtype}"
            raise ValueError(f"Fp8Weight: got {kinds}; expected a matrix in {FP8} and scales in float32")
        blocks = [-(-size // block) for size, block in zip(self.values.shape, self.block, strict=True)]
        if list(self.scales.shape) != blocks:
            raise ValueError(f"Fp8Weight: got scales {list(self.scales.shape)}; expected {blocks}")

    @property
    def block(self) -> tuple[int, int]:
        return self.block_rows, self.block_columns

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrix that a linear with states of `dtype` multiplies with."""
        rows, columns = self.shape
        scales = self.scales.repeat_interleave(self.block_rows, 0)[:rows]
        scales = scales.repeat_interleave(self.block_columns, 1)[:, :columns]
        return (_unpacked(self.values) if self.packed else self.values).float().mul_(scales).to(dtype)

    def rows(self, begin: int, end: int) -> Fp8Weight:
        """Rows `begin` to `end`, without a copy. Both are multiples of `block_rows`, or the end of the matrix."""
        if begin % self.block_rows or (end % self.block_rows and end != self.shape[0]):
            raise ValueError(f"Fp8Weight: rows {begin} to {end} cut a block of {self.block_rows} rows")
        scales = self.scales[begin // self.block_rows : -(-end // self.block_rows)]
        return dataclasses.replace(self, values=self.values[begin:end], scales=scales)

    def to(self, device: torch.device | str) -> Fp8Weight:
        return dataclasses.replace(self, values=self.values.to(device), scales=self.scales.to(device))


def quantised_by_row(weight: Tensor) -> Fp8Weight:
    """The nearest matrix in 8 bits with a scale for each row: its largest number becomes the largest of E4M3."""
    wide = weight.detach().float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return Fp8Weight((wide / scales).clamp(-LARGEST, LARGEST).to(FP8), scales, 1, weight.shape[1])


def joined(weights: list[Fp8Weight]) -> Fp8Weight | None:
    """One above the other; None where blocks differ or one of them would be cut."""
    first = weights[0]
    if any(each.packed != first.packed for each in weights):
        raise ValueError("joined: got packed and other matrices, expected all or none packed")
    if any(each.block != first.block for each in weights):
        return None
    if any(each.shape[0] % first.block_rows for each in weights[:-1]):
        return None
    values = torch.cat([each.values.view(torch.uint8) for each in weights]).view(FP8)
    return dataclasses.replace(first, values=values, scales=torch.cat([each.scales for each in weights]))


def packed_values(values: Tensor) -> Tensor:
    """`values` [N, K], K a multiple of 16, with the columns in the order of `PACKED`."""
    return _ordered(values, torch.tensor(PACKED))


def _unpacked(values: Tensor) -> Tensor:
    return _ordered(values, torch.tensor(PACKED).argsort())


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    rows, columns = values.shape
    groups = values.view(torch.uint8).reshape(rows, columns // len(order), len(order))
    return groups[..., order.to(values.device)].view(rows, columns).view(FP8)
