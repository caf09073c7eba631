"""Hands the library's own linear and norm modules to our kernels, in place and without copying a weight.

A module keeps its weights, its name and its place in the layer; only its `forward` becomes one kernel call. Modules
whose arithmetic is not exactly that of the kernel (Gemma's norms, GPT-2's transposed Conv1D, Falcon's linear) stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tide_core.kernels import Kernels


def use_kernels(model: Any, kernels: Kernels) -> int:
    """Modifies the modules of `model`; returns how many run on kernels now. The reference kernels change nothing."""
    if kernels.name == "reference":
        return 0

    class KernelLinear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return kernels.linear(input, self.weight, self.bias)

    class KernelRMSNorm(nn.Module):
        weight: torch.Tensor
        variance_epsilon: float

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    count = 0
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = KernelLinear
        elif _is_plain_rms_norm(module):
            module.__class__ = KernelRMSNorm
        else:
            continue
        count += 1
    return count


def _is_plain_rms_norm(module: nn.Module) -> bool:
    """The Llama norm, copied by name through many families: weight times the float32-normed state."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
