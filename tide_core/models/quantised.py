"""Linears and embeddings whose weights stay quantised: in blocks, as a GGUF file has them, or in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.panels import Panels
from tide_core.kernels.reference import ops as reference


class QuantisedLinear(nn.Linear):
    """In place of a linear. Its own forward is the reference; `use_kernels` binds the op of the device."""

    def __init__(self, panels: Panels, bias: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = panels.shape
        self.panels = panels
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return reference.quantised_linear(input, self.panels, self.bias)


class QuantisedEmbedding(nn.Module):
    """In place of an embedding, with the factor that some families multiply what they look up by."""

    def __init__(self, panels: Panels, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = panels.shape
        self.panels = panels
        self.scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = self.panels.rows(input.flatten()).view(*input.shape, self.embedding_dim)
        return found if self.scale is None else found * self.scale


class Fp8Linear(nn.Linear):
    """In place of a linear. Its own forward is the reference; `use_kernels` binds the op of the device.

    The weight is no parameter: a change of the model's dtype does not touch it, a change of its device does."""

    def __init__(self, fp8: Fp8Weight, bias: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = fp8.shape
        self.fp8 = fp8
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.fp8.dequantised(input.dtype), self.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        place = fn(torch.empty(0, dtype=torch.uint8, device=self.fp8.device)).device
        if place != self.fp8.device:
            self.fp8 = self.fp8.to(place)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def weight_of(module: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of a linear or a norm as numbers, [N, K] of a linear; None for a module without one. `dtype` is that
    of the model: a weight in FP8 is what a linear with such states multiplies with."""
    if isinstance(module, Fp8Linear):
        return module.fp8.dequantised(dtype)
    if isinstance(module, QuantisedLinear):
        return module.panels.rows(torch.arange(module.out_features))
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, torch.Tensor) else None


def weight_rows(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight of a linear, as numbers."""
    if isinstance(module, QuantisedLinear):
        return module.panels.rows(ids)
    weight = module.get_parameter("weight").detach()
    return weight[ids.to(weight.device)].contiguous()
