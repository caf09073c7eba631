"""Training steps as CUDA graphs, one for each shape of a batch.

A step launches thousands of small kernels, and on a data-centre GPU the launches take longer than the work. The
first batch of a shape runs as it is, the second is captured, all others are replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
Work = Callable[..., None]

LENGTH_STEP = 64
ROW_STEP = 8
"""Batches are padded to multiples of these, so that few shapes come up."""


class CapturedWork:
    """Work on tensors that neither waits for the device nor keeps anything but what it changes in place."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        self._device = device
        self._seen: set[tuple[torch.Size, ...]] = set()
        self._graphs: dict[tuple[torch.Size, ...], tuple[Any, Inputs]] = {}

    def __call__(self, *inputs: Tensor) -> None:
        """Do the work on inputs that are on the CPU or on the device."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._seen:
            self._seen.add(shapes)
            self._work(*(tensor.to(self._device) for tensor in inputs))
            return
        if shapes not in self._graphs:
            self._graphs[shapes] = self._captured(inputs)
        graph, own = self._graphs[shapes]
        for to, tensor in zip(own, inputs, strict=True):
            to.copy_(tensor, non_blocking=True)
        graph.replay()

    def _captured(self, inputs: Inputs) -> tuple[Any, Inputs]:
        own = tuple(tensor.to(self._device, copy=True) for tensor in inputs)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._work(*own)
        return graph, own


def padded_shape(num_rows: int, length: int) -> tuple[int, int]:
    """The shape that a batch of so many sequences of at most this length is padded to."""
    return -(-num_rows // ROW_STEP) * ROW_STEP, -(-length // LENGTH_STEP) * LENGTH_STEP
