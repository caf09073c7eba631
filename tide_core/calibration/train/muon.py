"""Muon: momentum whose every step of a matrix is made orthogonal, so that no direction of it is left behind.

As Keller Jordan's, with steps scaled to the size of AdamW's. Torch has one too, which computes in bfloat16 everywhere;
on processors without that it takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
ADAMW_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """For matrices alone."""

    def __init__(self, matrices: Iterable[Tensor], lr: float | Tensor, *, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1.0 - group["momentum"])
                ahead = matrix.grad.lerp(mean, group["momentum"])
                scale = ADAMW_RMS * max(matrix.shape) ** 0.5
                matrix.sub_(orthogonal(ahead) * (group["lr"] * scale))  # the rate may be a tensor


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of a matrix: singular values come out between about 0.7 and 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.mT if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = wide / (wide.norm() + 1e-7)
    first, second, third = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = first * wide + (second * gram + third * gram @ gram) @ wide
    flat: Tensor = wide.mT if tall else wide
    return flat.to(matrix.dtype)
