"""Linears that read one input, as one."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tide_core.kernels.fp8 import Fp8Weight, joined
from tide_core.models.quantised import Fp8Linear


def stacked(*linears: nn.Linear) -> torch.Tensor:
    """The weights one after another, for one pass; those of the linears become views of it."""
    return _join(linears, "weight")


def stacked_of_any(*linears: nn.Linear) -> torch.Tensor | Fp8Weight | None:
    """The same for linears of which some or all may be in FP8; None where they cannot be joined."""
    in_fp8 = [linear for linear in linears if isinstance(linear, Fp8Linear)]
    if not in_fp8:
        return stacked(*linears)
    return _join_fp8(in_fp8) if len(in_fp8) == len(linears) else None


def stacked_bias(*linears: nn.Linear) -> torch.Tensor | None:
    """Likewise the biases; None where there are none."""
    return None if linears[0].bias is None else _join(linears, "bias")


def _join_fp8(linears: list[Fp8Linear]) -> Fp8Weight | None:
    own = [linear.fp8 for linear in linears]
    values, scales = (_joined_before([getattr(weight, name) for weight in own]) for name in ("values", "scales"))
    if values is not None and scales is not None:
        return dataclasses.replace(own[0], values=values, scales=scales)
    whole = joined(own)
    if whole is not None:
        begin = 0
        for linear in linears:
            linear.fp8 = whole.rows(begin, begin + linear.out_features)
            begin += linear.out_features
    return whole


def _join(linears: tuple[nn.Linear, ...], name: str) -> torch.Tensor:
    own = [getattr(linear, name).detach() for linear in linears]
    joined = _joined_before(own)
    if joined is not None:
        return joined
    stack = torch.cat(own)
    parts = torch.split(stack, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return stack


def _joined_before(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """What these are already views of, one after another: it must stay where it is, for graphs may have been captured
    with it. None if they are not."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if len(parts) == 1 or not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    size = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(size, first.stride())
