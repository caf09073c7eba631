"""Linears that read one input, as one."""

from __future__ import annotations

import torch
from torch import nn


def stacked(*linears: nn.Linear) -> torch.Tensor:
    """The weights behind one another, for one pass; those of the linears become views of it."""
    return _join(linears, "weight")


def stacked_bias(*linears: nn.Linear) -> torch.Tensor | None:
    """Likewise the biases; None where there are none."""
    return None if linears[0].bias is None else _join(linears, "bias")


def _join(linears: tuple[nn.Linear, ...], name: str) -> torch.Tensor:
    stack = torch.cat([getattr(linear, name).detach() for linear in linears])
    parts = torch.split(stack, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return stack
