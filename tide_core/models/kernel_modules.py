"""Hands the library's own linear, norm, embedding, gated MLP and rotary code to our kernels, in place.

A module keeps its weights (none is copied), its name and its place in the layer; only its `forward` becomes kernel
calls. It is called directly, past the hooks of `nn.Module`, which are not used here and cost as much as a small
kernel. Modules whose arithmetic is not exactly that of the kernel (Gemma's norms, GPT-2's transposed Conv1D, Falcon's
linear) stay.

Attention modules keep their own forward. One name in it, the function that applies rotary positions, is bound to our
kernel, in a copy of the forward that belongs to this model's modules alone: the library itself is not touched. Experts
and routers are in `experts.py`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from typing import Any

import torch
from torch import nn

from tide_core.kernels import CudaKernels, Kernels
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.panels import Panels
from tide_core.kernels.reference import ops as reference
from tide_core.models.experts import SILU, use_kernels_for_experts
from tide_core.models.quantised import Fp8Linear, QuantisedLinear
from tide_core.models.rebound import rebound

logger = logging.getLogger("tide")
ROTARY_FUNCTION = "apply_rotary_pos_emb"


def use_kernels(model: Any, kernels: Kernels) -> int:
    """Modifies the modules of `model`; returns how many run on kernels now. The reference kernels change nothing."""
    if kernels.name == "reference":
        return 0

    class KernelLinear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return kernels.linear(input, self.weight, self.bias)

        __call__ = forward

    class KernelQuantisedLinear(QuantisedLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert kernels.quantised_linear is not None, "quantised weights are loaded on a CPU only"
            return kernels.quantised_linear(input, self.panels, self.bias)

        __call__ = forward

    class KernelFp8Linear(Fp8Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            weight: Any = self.fp8 if isinstance(kernels, CudaKernels) else self.fp8.dequantised(input.dtype)
            return kernels.linear(input, weight, self.bias)

        __call__ = forward

    class KernelRMSNorm(nn.Module):
        weight: torch.Tensor
        variance_epsilon: float

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)

        __call__ = forward

    class KernelGatedMLP(nn.Module):
        gate_proj: nn.Module
        up_proj: nn.Module
        down_proj: nn.Module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gated: torch.Tensor = self.down_proj(kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))
            return gated

        __call__ = forward

    class KernelEmbedding(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert isinstance(kernels, CudaKernels)
            return kernels.embed(input.flatten(), self.weight).view(*input.shape, self.embedding_dim)

        __call__ = forward

    count = 0
    attentions: dict[type[nn.Module], type[nn.Module]] = {}
    for name, module in model.named_modules():
        if (bound := _with_rotary(type(module), kernels, attentions)) is not None:
            module.__class__ = bound
            count += 1
            continue
        if is_gated_silu_mlp(module):
            module.__class__ = KernelGatedMLP
        elif type(module) is nn.Linear:
            module.__class__ = KernelLinear
        elif isinstance(module, QuantisedLinear):
            module.__class__ = KernelQuantisedLinear
        elif type(module) is Fp8Linear:
            if isinstance(kernels, CudaKernels):
                try:
                    module.fp8 = _packed(module.fp8)
                except ValueError as error:
                    logger.warning("%s runs in plain Torch: %s", name, error)
                    continue
            module.__class__ = KernelFp8Linear
        elif type(module) is nn.Embedding and isinstance(kernels, CudaKernels):
            module.__class__ = KernelEmbedding
        elif is_plain_rms_norm(module):
            module.__class__ = KernelRMSNorm
        else:
            continue
        count += 1
    return count if isinstance(kernels, CudaKernels) else count + use_kernels_for_experts(model, kernels)


def use_kernels_for_training(model: Any, kernels: Kernels) -> None:
    """Binds the linears alone whose weights stay in blocks, and lets gradients through them."""
    product: Any = _TrainedThrough.apply

    class TrainedThrough(QuantisedLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = product(input, self.panels, self.bias, kernels.quantised_linear)
            return y

    for module in model.modules():
        if type(module) is QuantisedLinear:
            module.__class__ = TrainedThrough


class _TrainedThrough(torch.autograd.Function):
    """The gradient is that of the same product with states that are not rounded: rounding has none."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, panels: Panels, bias: torch.Tensor | None, op: Any) -> Any:
        ctx.panels = panels
        return op(input, panels, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ ctx.panels.whole(), None, None, None


def _packed(weight: Fp8Weight) -> Fp8Weight:
    """In the order that the CUDA kernels read, if it is not yet: another engine may have done so for this model.
    ValueError for one that they cannot read."""
    packed: Fp8Weight = importlib.import_module("tide_core.kernels.cuda.fp8").packed(weight)
    return packed


def _with_rotary(
    kind: type[nn.Module], kernels: Kernels, known: dict[type[nn.Module], type[nn.Module]]
) -> type[nn.Module] | None:
    """The attention class `kind` with its rotary function bound to the kernel; None if it has no such function."""
    forward: Any = kind.forward
    library = getattr(forward, "__globals__", {}).get(ROTARY_FUNCTION)
    if library is None or ROTARY_FUNCTION not in forward.__code__.co_names or not _rotates_in_halves(library):
        return None
    if kind not in known:

        def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
            if not q.shape[-1] == k.shape[-1] == cos.shape[-1] or cos.dtype is not q.dtype:
                return library(q, k, cos, sin)  # only part of each head is rotated, or in float32 as by OLMo 2
            cos, sin = cos[0], sin[0]
            return tuple(kernels.rotary(x[0].transpose(0, 1), cos, sin).transpose(0, 1).unsqueeze(0) for x in (q, k))

        known[kind] = rebound(kind, **{ROTARY_FUNCTION: rotary})
    return known[kind]


def _rotates_in_halves(library: Any) -> bool:
    """Whether the library's function is the Llama one, by what it computes; others interleave their halves."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.rand(*shape, generator=generator) for shape in ((1, 2, 3, 4), (1, 1, 3, 4), *[(1, 3, 4)] * 2)
    )
    try:
        got = library(q, k, cos, sin)
    except (TypeError, ValueError, IndexError, RuntimeError):  # it takes other arguments or shapes
        return False
    expected = [reference.rotary(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1).unsqueeze(0) for x in (q, k)]
    return all(torch.allclose(one, other) for one, other in zip(got, expected, strict=True))


def is_plain_embedding(module: nn.Module) -> bool:
    """A look-up and nothing else; some families scale what they find."""
    return type(module).__name__ in ("Embedding", "KernelEmbedding")


def is_plain_rms_norm(module: nn.Module) -> bool:
    """The Llama norm, copied by name through many families: weight times the float32-normed state.

    Of the library's, by what it computes in the dtype of its weight: the norms of OLMo 2 and gpt-oss round once where
    Llama's rounds twice, which is the same in float32 alone."""
    kind: Any = type(module)
    if not (kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        return False
    return not kind.__module__.startswith("transformers.") or _norms_like_llama(kind, next(module.parameters()).dtype)


@functools.cache
def _norms_like_llama(kind: Any, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((4, 64), (64,)))
    norm: Any = types.SimpleNamespace(weight=weight, variance_epsilon=1e-5)
    try:
        got = kind.forward(norm, x)
    except (AttributeError, TypeError, RuntimeError):  # it needs more than a weight
        return False
    return torch.equal(got, reference.rms_norm(x, weight, 1e-5))


def is_gated_silu_mlp(module: nn.Module) -> bool:
    """The Llama MLP, copied likewise: down(silu(gate(x)) * up(x)) over three linears and nothing else."""
    children = dict(module.named_children())
    linears = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        type(module).__name__.endswith("MLP")
        and len(children) == 4
        and all(isinstance(linear, nn.Linear) for linear in linears)
        and type(children.get("act_fn")).__name__ in SILU
    )
