"""Those who train together: each works on its share of every batch, and their gradients are added up.

The sum is that of the whole batch, so a group of any size trains as one process does, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    rank: int
    size: int

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over the group into every one's tensors."""


class One:
    """A process that trains alone."""

    rank, size = 0, 1

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass


ALONE = One()


class TorchGroup:
    """The processes of `torch.distributed`, which somebody has started."""

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
