"""Experts and their routers on a CPU, so that a token's result does not depend on its batch mates.

The library sorts the tokens of a step by expert and multiplies each group with the weights of its expert. How Torch
adds such a product up depends on the size of the group, and so do the scores by which a router chooses. Here both are
done by our linear, which gives a row the same bits in any batch, and a token adds its experts up in its router's order.
On a GPU the library's grouped product stays: one expert after another would take thousands of launches there.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from tide_core.kernels import Kernels
from tide_core.models.rebound import rebound

SILU = ("SiLU", "SiLUActivation")


def use_kernels_for_experts(model: nn.Module, kernels: Kernels) -> int:
    """Modifies the experts and routers of `model`; returns how many."""
    functions = types.SimpleNamespace(**{**vars(nn.functional), "linear": kernels.linear})
    known: dict[type[nn.Module], type[nn.Module]] = {}
    count = 0
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            if _is_router(kind):
                known[kind] = rebound(kind, F=functions)
            elif _are_gated_experts(module):
                known[kind] = _experts_kind(kind, kernels)
            else:
                continue
        if _are_gated_experts(module):
            _store_rows(module)
        module.__class__ = known[kind]
        count += 1
    return count


def _is_router(kind: type[nn.Module]) -> bool:
    """Whether its forward calls `F.linear`."""
    code = getattr(kind.forward, "__code__", None)
    return kind.__name__.endswith("Router") and code is not None and {"F", "linear"} <= set(code.co_names)


def _are_gated_experts(module: nn.Module) -> bool:
    """The library's experts: the weights of all in one tensor, a gate, a number for each chosen expert of a token."""
    return (
        type(module).__name__.endswith("Experts")
        and all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "is_transposed", "_apply_gate"))
        and not getattr(module, "has_post_expert_norm", False)
    )


def _store_rows(experts: Any) -> None:
    """Store weights that the library transposes, [E, K, N], as the rows [E, N, K] that our linear reads. The parameter
    keeps its shape and its values."""
    if experts.is_transposed:
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def _experts_kind(kind: type[nn.Module], kernels: Kernels) -> type[nn.Module]:
    def forward(self: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """States [T, D], ids and weights [T, k] of their experts: the weighted sum [T, D]."""
        each = states.new_empty(*chosen.shape, states.shape[-1])
        for expert in sorted(set(chosen.flatten().tolist())):
            token, place = torch.where(chosen == expert)
            gate_up = kernels.linear(states[token], *_rows(self, "gate_up_proj", expert))
            gated = _gated(self, gate_up, kernels)
            each[token, place] = kernels.linear(gated, *_rows(self, "down_proj", expert))
        weighted = (each * weights.unsqueeze(-1)).float()
        total = weighted[:, 0]
        for index in range(1, weighted.shape[1]):
            total = total + weighted[:, index]
        return total.to(states.dtype)

    return type(kind.__name__, (kind,), {"forward": forward, "__call__": forward})


def _rows(experts: Any, name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [N, K] and bias [N] of one expert."""
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return (weight.T if experts.is_transposed else weight), bias


def _gated(experts: Any, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The gate of the experts. Torch may compute the numbers at the end of a tensor otherwise than those before, so a
    gate that is not the usual one gets one row at a time."""
    if experts._apply_gate.__name__ == "_default_apply_gate" and type(experts.act_fn).__name__ in SILU:
        gate, up = gate_up.chunk(2, dim=-1)
        return kernels.silu_mul(gate.contiguous(), up.contiguous())
    return torch.stack([experts._apply_gate(row) for row in gate_up])
