"""Linears and embeddings whose weights stay block-quantised, as a GGUF file has them."""

from __future__ import annotations

import torch
from torch import nn

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


def weight_rows(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight of a linear, as numbers."""
    if isinstance(module, QuantisedLinear):
        return module.panels.rows(ids)
    weight = module.get_parameter("weight").detach()
    return weight[ids.to(weight.device)].contiguous()
