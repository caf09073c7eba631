"""The frozen model as the teacher of the heads: its states at the checkpoints and its final distribution.

One forward pass per batch; no states are stored. Logits are float32 whatever the model's dtype: in bfloat16 the best
two tokens of a position often have equal logits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tide_core.batch import KVView
from tide_core.exits.artefact.heads import ExitHead
from tide_core.models.adapter import LayerInputs, ModelAdapter
from tide_core.models.kernel_modules import is_plain_rms_norm

PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose layers can be called one by one without a mask; others use the library's own forward."""
CHUNK_ROWS = 4096
"""Rows of logits over the whole vocabulary in memory at once."""


@dataclass(frozen=True, slots=True)
class States:
    """Of one batch, [B, S, D] each."""

    at: dict[int, Tensor]
    """By checkpoint layer or tap."""
    last: Tensor
    """After the last layer."""
    normed: Tensor
    """The same after the final norm."""

    def fed_to(self, head: ExitHead) -> Tensor:
        """The deep states [B, S, D] that a head takes as input."""
        return head.deep_state(self.normed, [self.at[tap] for tap in head.spec.taps])


@dataclass(frozen=True, slots=True)
class Targets:
    """Full-depth predictions at N positions of a batch."""

    rows: Tensor
    """[N] of the flattened batch."""
    top: Tensor
    """[N] ids of the best tokens of the whole vocabulary."""
    distribution: Tensor
    """[N, size of the shortlist] probabilities within the shortlist."""
    mass: Tensor
    """[N] probability of the shortlist in the whole vocabulary, times the weight of the position."""
    weight: Tensor
    """[N] 1, or 0 for a row of padding."""
    mass_sum: Tensor
    weight_sum: Tensor
    """Sums over the whole batch; the rows may be those of one process of a group."""


class NoCache:
    """A KV view for layers that run without a cache."""

    write_only = True


class Teacher:
    """A frozen model that returns states and targets."""

    def __init__(self, adapter: ModelAdapter, shortlist: Tensor, *, mixed: bool = False) -> None:
        """`mixed`: on CUDA, logits of a bfloat16 model are products of bfloat16 numbers, added up in float32; without
        it the states are not rounded. The weights are in bfloat16 in any case."""
        self._adapter = adapter
        self.shortlist = shortlist.to(adapter.device)
        self._short = adapter.narrow_head(self.shortlist)
        self._short_logits: Any = self._short
        self._whole: Any = adapter.head
        self._norm: Any = adapter.norm
        plain = self._short.plain_linear is not None and self._short.linear.bias is None
        self._mixed = mixed and plain and adapter.dtype == torch.bfloat16 and adapter.device.type == "cuda"
        if self._mixed:
            norm = getattr(adapter.backbone, adapter.family.norm)
            self._norm = nn.Identity() if norm is None else copy.deepcopy(norm).float()
            self._whole = self._product_with(adapter.head_rows)
            self._short_logits = self._product_with(self._short.linear.weight)
        elif adapter.dtype != torch.float32 and adapter.family.finish is None:
            norm = getattr(adapter.backbone, adapter.family.norm)
            self._norm = nn.Identity() if norm is None else copy.deepcopy(norm).float()
            self._short_logits = self._short = self._short.float()
            self._whole = adapter.narrow_head(torch.arange(adapter.vocab_size)).float()

    @torch.no_grad()
    def run(self, tokens: Tensor, layers: Sequence[int]) -> States:
        """All layers over right-padded tokens [B, S]; attention is causal, so padding changes no real position."""
        wanted = {*layers, self._adapter.num_layers}
        seen = self._layer_by_layer(tokens, wanted) if self.is_plain else self._hooked(tokens, wanted)
        last = seen[self._adapter.num_layers]
        return States({layer: seen[layer] for layer in layers}, last, self.final_norm(last))

    @property
    def adapter(self) -> ModelAdapter:
        return self._adapter

    @property
    def num_layers(self) -> int:
        return self._adapter.num_layers

    @torch.no_grad()
    def final_norm(self, last: Tensor) -> Tensor:
        """Of states after the last layer."""
        normed: Tensor = self._adapter.norm(last)
        return normed

    @property
    def is_plain(self) -> bool:
        return runs_layer_by_layer(self._adapter)

    def _layer_by_layer(self, tokens: Tensor, wanted: set[int]) -> dict[int, Tensor]:
        adapter, (num_rows, length) = self._adapter, tokens.shape
        positions = torch.arange(length, device=tokens.device)
        states = adapter.embed(tokens.flatten(), positions.repeat(num_rows)).view(num_rows, length, -1)
        inputs = plain_inputs(adapter, positions)
        seen: dict[int, Tensor] = {}
        for layer in range(adapter.num_layers):
            states = adapter.run_layers(states, layer, layer + 1, inputs)
            if layer + 1 in wanted:
                seen[layer + 1] = states
        return seen

    def _hooked(self, tokens: Tensor, wanted: set[int]) -> dict[int, Tensor]:
        """The library's own forward; hooks record the states."""
        seen: dict[int, Tensor] = {}

        def record(layer: int) -> Any:
            def hook(module: nn.Module, inputs: object, output: Any) -> None:
                seen[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        adapter = self._adapter
        with contextlib.ExitStack() as stack:
            for layer in wanted:
                stack.callback(adapter.layers[layer - 1].register_forward_hook(record(layer)).remove)
            adapter.backbone(input_ids=tokens, use_cache=False)
        return seen

    @torch.no_grad()
    def targets(self, states: States, rows: Tensor, *, weight: Tensor | None = None) -> Targets:
        """Full-depth predictions at these rows of the flattened batch."""
        tops, distributions, masses = [], [], []
        for chunk in _chunks(states.last.flatten(0, 1).index_select(0, rows)):
            logits = self._whole(self._normed(chunk)).float()
            short = logits.index_select(1, self.shortlist)
            tops.append(logits.argmax(-1))
            masses.append((short.logsumexp(-1) - logits.logsumexp(-1)).exp())
            distributions.append(short.softmax(-1))
        mass = torch.cat(masses)
        weight = torch.ones_like(mass) if weight is None else weight
        mass = mass * weight
        return Targets(rows, torch.cat(tops), torch.cat(distributions), mass, weight, mass.sum(), weight.sum())

    @torch.no_grad()
    def top_tokens(self, states: States, rows: Tensor) -> Tensor:
        """The best tokens only, [N]."""
        chunks = _chunks(states.last.flatten(0, 1).index_select(0, rows))
        return torch.cat([self._whole(self._normed(chunk)).argmax(-1) for chunk in chunks])

    def exit_logits(self, features: Tensor) -> Tensor:
        """Features of a head [N, D] to float32 logits over the shortlist; gradients flow."""
        logits: Tensor = self._short_logits(self._normed(features))
        return logits.float()

    def _normed(self, features: Tensor) -> Tensor:
        normed: Tensor = self._norm(features.to(torch.float32 if self._mixed else self._short.linear.weight.dtype))
        return normed

    def _product_with(self, weight: Tensor) -> Any:
        frozen = weight.detach()
        return lambda normed: MixedProduct.apply(normed, frozen)  # type: ignore[no-untyped-call]


class MixedProduct(torch.autograd.Function):
    """Inputs [N, D] times frozen bfloat16 weights [V, D]: [N, V] in float32, with bfloat16 factors."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _float32_product(inputs.to(weight.dtype), weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return _float32_product(gradients[0].to(weight.dtype), weight), None


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def runs_layer_by_layer(adapter: ModelAdapter) -> bool:
    """Whether every layer attends to all earlier positions, so that layers need no mask and no host reads."""
    config = adapter.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return (
        type(adapter.model).__name__ in PLAIN
        and kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3")
        and not adapter.has_experts
    )


def plain_inputs(adapter: ModelAdapter, positions: Tensor) -> LayerInputs:
    """Inputs of layers that are called one by one, without a cache and without a mask."""
    inputs = adapter.layer_inputs(positions, cast(KVView, NoCache()))
    inputs.common.update({adapter.family.cache_argument: None, "attention_mask": None, "use_cache": False})
    return inputs


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, CHUNK_ROWS)  # at least one, possibly empty


@contextlib.contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """Use TF32 products on CUDA: the inputs have about the precision of bfloat16."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.set_float32_matmul_precision(before)


class FusedRMSNorm(nn.Module):
    """The library's RMS norm as one kernel; it rounds once where the library rounds twice."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@contextlib.contextmanager
def fused_norms(model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Replace the model's plain RMS norms, eight small kernels each, by one kernel while the block runs.

    For training only: traces are made with the library's own norms."""
    norms = [(module, type(module)) for module in model.modules() if enabled and is_plain_rms_norm(module)]
    for module, _ in norms:
        module.__class__ = FusedRMSNorm
    try:
        yield
    finally:
        for module, kind in norms:
            module.__class__ = kind
