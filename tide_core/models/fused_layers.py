"""Decoder layers of the Llama kind in few launches, on a GPU.

A layer of the library's is some twenty small ops. Where all it does is known, it becomes: joined projection with the
norm before it, attention with rotation and the write of K and V, output projection with the residual, gated projection
with the norm before it, down projection with the residual: five launches. Wide layers have their norms apart, and rows
of many queries their rotation. For tokens that skip a layer there are two: K and V alone are projected, turned and
written. Weights are joined in place, not copied twice, and the library's forward stays for views that cannot do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tide_core.batch import KVWritten, Rotation
from tide_core.kernels import CudaKernels
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.models.kernel_modules import is_gated_silu_mlp, is_plain_rms_norm
from tide_core.models.quantised import Fp8Linear
from tide_core.models.stacked import stacked_bias, stacked_of_any

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers that are known to do this and nothing else."""


class FusedLayer:
    """A layer that has been fused."""


def fuse_layers(layers: Sequence[Any], kernels: CudaKernels) -> int:
    """Modifies the layers that can be fused; returns how many."""
    known: dict[type[nn.Module], type[nn.Module]] = {}
    count = 0
    for layer in layers:
        if not _can_be_fused(layer):
            continue
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        qkv, gate_up = stacked_of_any(*projections), stacked_of_any(mlp.gate_proj, mlp.up_proj)
        if qkv is None or gate_up is None:  # some in FP8 and some not, or a block of them would be cut
            continue
        layer._qkv, layer._qkv_bias, layer._gate_up = qkv, stacked_bias(*projections), gate_up
        kind = type(layer)
        count += 1
        if issubclass(kind, FusedLayer):  # by another engine on this model
            continue
        if kind not in known:
            known[kind] = _fused_kind(kind, kernels)
        layer.__class__ = known[kind]
    return count


def _can_be_fused(layer: Any) -> bool:
    if type(layer).__name__ not in KINDS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(is_plain_rms_norm(norm) for norm in norms)
        and is_gated_silu_mlp(mlp)
        and not any(type(module) is Fp8Linear for module in layer.modules())  # one that no kernel reads
        and all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    )


def _fused_kind(kind: type[nn.Module], kernels: CudaKernels) -> type[nn.Module]:
    library: Any = kind.forward

    class Fused(kind, FusedLayer):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> Any:
            view, rotation = inputs["attention_mask"], inputs["position_embeddings"]
            if not isinstance(rotation, Rotation):
                if not hasattr(view, "attend_joined") or rotation[0].shape[-1] != self.self_attn.head_dim:
                    return library(self, hidden_states, **inputs)
                rotation = Rotation(rotation[0][0], rotation[1][0], None)
            if view.write_only:
                _write(self, hidden_states[0], rotation, view, kernels)
                raise KVWritten
            return _run(self, hidden_states[0], rotation, view, kernels).unsqueeze(0)

        __call__ = forward

    Fused.__name__ = kind.__name__
    return Fused


def _run(layer: Any, states: torch.Tensor, rotation: Rotation, view: Any, kernels: CudaKernels) -> torch.Tensor:
    attention, before, after = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    eps = before.variance_epsilon
    attended = view.attend_joined(
        attention.layer_idx,
        kernels.fused_linear(states, layer._qkv, layer._qkv_bias, norm=(before.weight, eps)),
        rotation,
        (_weight(attention, "q_norm"), _weight(attention, "k_norm")),
        eps,
        attention.scaling,
        _window(attention),
    ).flatten(1)
    states = kernels.fused_linear(attended, _matrix(attention.o_proj), attention.o_proj.bias, residual=states)
    gated = kernels.fused_linear(states, layer._gate_up, gated=True, norm=(after.weight, after.variance_epsilon))
    return kernels.fused_linear(gated, _matrix(layer.mlp.down_proj), residual=states)


def _write(layer: Any, states: torch.Tensor, rotation: Rotation, view: Any, kernels: CudaKernels) -> None:
    """What the layer would cache for these states, and nothing else of it."""
    attention, before = layer.self_attn, layer.input_layernorm
    size = attention.k_proj.out_features + attention.v_proj.out_features  # the last rows of the joined projection
    bias = None if layer._qkv_bias is None else layer._qkv_bias[-size:]
    norm = before.weight, before.variance_epsilon
    keys_values = kernels.fused_linear(states, _last_rows(layer._qkv, size), bias, norm=norm)
    view.write_joined(attention.layer_idx, keys_values, rotation, view.slots, _weight(attention, "k_norm"), norm[1])


def _matrix(linear: nn.Linear) -> torch.Tensor | Fp8Weight:
    return linear.fp8 if isinstance(linear, Fp8Linear) else linear.weight


def _last_rows(weight: torch.Tensor | Fp8Weight, count: int) -> torch.Tensor | Fp8Weight:
    if isinstance(weight, Fp8Weight):
        return weight.rows(weight.shape[0] - count, weight.shape[0])
    return weight[-count:]


def _weight(module: Any, name: str) -> torch.Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight


def _window(attention: Any) -> int:
    """The attention window, 0 for all: an attribute of the layer, or of the config for all layers."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    return getattr(attention.config, "sliding_window", None) or 0
