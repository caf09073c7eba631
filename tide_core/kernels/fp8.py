"""Weights in 8 bits (E4M3) with scales in float32, and the one rule of what number each of them is.

The weight a linear multiplies with is `dtype(float32(value) · scale)`: the product in float32, then one rounding to the
type of the states. Whoever reads 8 bits (a kernel, in registers) and whoever widens the matrix first so multiply with
the same numbers, and their results may be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
    columns lie in the order of `PACKED`; numbers, shape and scales are those of the columns in their own order.
    `dealt`: so they do, and the bits of each four are dealt out over their word as `_dealt` has it."""

    values: Tensor
    scales: Tensor
    block_rows: int
    block_columns: int
    packed: bool = False
    dealt: bool = False

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
        return self.plain_values().float().mul_(scales).to(dtype)

    def plain_values(self) -> Tensor:
        """The values with the columns in their own order."""
        return _unpacked(self.values, self.dealt) if self.packed else self.values

    def rows(self, begin: int, end: int) -> Fp8Weight:
        """Rows `begin` to `end`, without a copy. Both are multiples of `block_rows`, or the end of the matrix."""
        if begin % self.block_rows or (end % self.block_rows and end != self.shape[0]):
            raise ValueError(f"Fp8Weight: rows {begin} to {end} cut a block of {self.block_rows} rows")
        scales = self.scales[begin // self.block_rows : -(-end // self.block_rows)]
        return dataclasses.replace(self, values=self.values[begin:end], scales=scales)

    def to(self, device: torch.device | str) -> Fp8Weight:
        return dataclasses.replace(self, values=self.values.to(device), scales=self.scales.to(device))


def quantised_by_row(weight: Tensor) -> Fp8Weight:
    """The nearest matrix in 8 bits with a scale for each row: its largest number becomes the largest of E4M3. Scales
    are rounded to bfloat16, which kernels read faster (`can_deal`)."""
    wide = weight.detach().float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).bfloat16().float()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return Fp8Weight((wide / scales).clamp(-LARGEST, LARGEST).to(FP8), scales, 1, weight.shape[1])


def joined(weights: list[Fp8Weight]) -> Fp8Weight | None:
    """One above the other; None where blocks differ or one of them would be cut."""
    first = weights[0]
    if any(each.packed != first.packed for each in weights):
        raise ValueError("joined: got packed and other matrices, expected all or none packed")
    if any(each.block != first.block for each in weights):
        return None
    if any(each.dealt != first.dealt for each in weights):
        return joined([repacked(each, dealt=False) for each in weights])
    if any(each.shape[0] % first.block_rows for each in weights[:-1]):
        return None
    values = torch.cat([each.values.view(torch.uint8) for each in weights]).view(FP8)
    return dataclasses.replace(first, values=values, scales=torch.cat([each.scales for each in weights]))


def can_deal(scales: Tensor) -> bool:
    """Whether all scales are normal numbers of bfloat16 below 2^7: a product with one of them in bfloat16 is then the
    number of the rule, and kernels need no float32."""
    size = scales.abs()
    return bool(((scales.bfloat16() == scales) & (size >= 2.0**-126) & (size < 2.0**7)).all())


def repacked(weight: Fp8Weight, *, dealt: bool) -> Fp8Weight:
    """The same numbers, packed in one way or the other; K is a multiple of 16."""
    if weight.packed and weight.dealt == dealt:
        return weight
    values = _ordered(weight.plain_values(), torch.tensor(PACKED))
    if dealt:
        values = _in_parts(values, _dealt)
    return dataclasses.replace(weight, values=values, packed=True, dealt=dealt)


def _unpacked(values: Tensor, dealt: bool) -> Tensor:
    if dealt:
        values = _in_parts(values, _gathered)
    return _ordered(values, torch.tensor(PACKED).argsort())


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    rows, columns = values.shape
    groups = values.view(torch.uint8).reshape(rows, columns // len(order), len(order))
    return groups[..., order.to(values.device)].view(rows, columns).view(FP8)


def _in_parts(values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of the words of some rows at a time: it needs several times their memory."""
    made = torch.empty_like(values, memory_format=torch.contiguous_format).view(torch.uint8)
    for begin in range(0, values.shape[0], 1024):
        part = values[begin : begin + 1024].view(torch.uint8)
        made[begin : begin + 1024] = change(part.reshape(-1, 4)).view(part.shape)
    return made.view(FP8)


def _dealt(words: Tensor) -> Tensor:
    """Bytes a, b, c, d become two halves of 16 bits, of a and c and of b and d. In each a has bits 15 and 10 to 4,
    where bfloat16 has sign, exponent and mantissa, and c the others: its sign 11, then 14 to 12, then 3 to 0."""
    first, second = words[:, :2], words[:, 2:]
    upper = first & 0x80 | first >> 4 & 0x07 | second >> 4 & 0x08 | second & 0x70
    lower = first << 4 & 0xF0 | second & 0x0F
    return torch.stack([lower, upper], dim=2).flatten(1)


def _gathered(words: Tensor) -> Tensor:
    """What `_dealt` was given."""
    lower, upper = words[:, 0::2], words[:, 1::2]
    first = upper & 0x80 | upper << 4 & 0x70 | lower >> 4
    second = upper << 4 & 0x80 | upper & 0x70 | lower & 0x0F
    return torch.cat([first, second], dim=1)
