"""Data-parallel training: each process works on its share of every batch, and gradients are summed over all processes.

The sum is that of the whole batch, so any number of processes trains as one does, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class ProcessGroup(Protocol):
    rank: int
    size: int

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace every process's tensors by their sums over the group."""


class SingleProcess:
    """A process that trains alone."""

    rank, size = 0, 1

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        pass


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The processes of `torch.distributed`, which the caller has initialised."""

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
