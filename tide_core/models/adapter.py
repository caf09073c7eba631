"""One interface over any known Hugging Face decoder: embed, run a range of layers, norm, head.

The layers are the library's. What changes is what they are handed: a view of the paged KV pool stands where they
expect a cache, and the same view stands where they expect an attention mask, so that it reaches the attention function
registered here as an argument. All tokens of a step travel as one sequence, [1, T, D], whatever row they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import nn

from tide_core.batch import KVView, KVWritten, Rotation
from tide_core.errors import ModelError
from tide_core.models.families import Family, falcon_mask, find_family
from tide_core.models.kernel_modules import is_plain_embedding, is_plain_rms_norm
from tide_core.models.quantised import weight_rows
from tide_core.models.weights import num_weights

ATTENTION = "tide"
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose rotation depends on the position alone."""
MOST_KEPT_POSITIONS = 2**16


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: KVView,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registry's entry: the mask argument is the step's view of the KV pool, `s_aux` the sink of every head."""
    more = {} if s_aux is None else {"sinks": s_aux}  # most views have no such parameter
    out = attention_mask.attend(
        module.layer_idx,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        **more,
    )
    return out, None


def register_attention() -> None:
    """Register it with the library, when a model is first loaded: importing its models takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of every layer of a step other than the states; by layer type where types differ."""

    common: dict[str, Any]
    rotary: dict[str | None, Any]


class ModelAdapter:
    """A loaded causal LM, opened at its layers."""

    def __init__(self, model: Any, *, paged: bool = True) -> None:
        """`paged` hands the model's attention to the KV view; without it the library's own forward stays usable."""
        register_attention()
        self.family: Family = find_family(model)
        self.model = model
        self.config = model.config
        self.backbone = reduce(getattr, self.family.backbone.split("."), model)
        self.layers: list[nn.Module] = list(getattr(self.backbone, self.family.layers))
        self._norm = getattr(self.backbone, self.family.norm)
        self._rotary: Any = getattr(self.backbone, "rotary_emb", None)
        self._rotary_tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._turns_by_table = False
        self._head = model.get_output_embeddings()
        self.scale_logits = _logit_scaling(self.family, self.config)
        self._layer_types = self._rotary_layer_types()
        if paged:
            self.config._attn_implementation = "sdpa" if self.family.attention == "inline" else ATTENTION

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_layer_weights(self) -> int:
        """How many numbers the weights of all layers are, quantised or not."""
        return sum(num_weights(layer) for layer in self.layers)

    @property
    def vocab_size(self) -> int:
        return int(self._head.out_features)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.dtype)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @property
    def gathers_kv(self) -> bool:
        """Whether layers must be handed whole contexts instead of attending over pages."""
        return self.family.attention in ("latent", "inline")

    @property
    def has_experts(self) -> bool:
        """Whether layers choose among experts, which they do by values that the host must read."""
        return bool(getattr(self.config, "num_local_experts", None) or getattr(self.config, "n_routed_experts", None))

    @property
    def has_fixed_positions(self) -> bool:
        """Whether rotations, if the model has any, are those of a table that `keep_rotations` has made."""
        return self._rotary is None or self._rotary_tables is not None

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for.

        Long-rope models switch their frequencies for the whole batch once any row is longer than their original
        length; up to there no row depends on its mates, so that is the limit here."""
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if not limit:
            raise ModelError("config.max_position_embeddings", limit, "the model's longest sequence")
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
        return int(limit)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-text ids: those of the generation config, else of the config. One the model cannot emit is none."""
        for source in (getattr(self.model, "generation_config", None), self.config):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                several = ids if isinstance(ids, (list, tuple)) else (ids,)
                return tuple(int(token_id) for token_id in several if 0 <= int(token_id) < self.vocab_size)
        return ()

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T], [T] -> the states that enter layer 0, [1, T, D]."""
        ids, positions = token_ids.unsqueeze(0), positions.unsqueeze(0)
        if self.family.embed is not None:
            return self.family.embed(self.backbone, ids, positions)
        return cast(torch.Tensor, self.backbone.embed_tokens(ids))

    @property
    def plain_embedding(self) -> torch.Tensor | None:
        """The rows that tokens enter with, where looking them up is all that happens."""
        embedding = getattr(self.backbone, "embed_tokens", None)
        plain = self.family.embed is None and isinstance(embedding, nn.Embedding) and is_plain_embedding(embedding)
        return embedding.weight if plain and embedding is not None else None

    def layer_inputs(self, positions: torch.Tensor, view: KVView) -> LayerInputs:
        """What `run_layers` needs to know of a step's tokens, computed once for all layers."""
        position_ids = positions.unsqueeze(0)
        common: dict[str, Any] = {
            "position_ids": position_ids,
            self.family.cache_argument: view,
            "attention_mask": view,
            "use_cache": True,
        }
        if self.family.attention == "inline":
            mask = (None, None) if view.write_only else falcon_mask(self.backbone, view, self.dtype)
            common["attention_mask"], common["alibi"] = mask
        if self._rotary is None:
            return LayerInputs(common, {})
        if self._rotary_tables is None:
            return LayerInputs(common, self._rotations(position_ids))
        if self._turns_by_table and hasattr(view, "attend_joined"):
            tables = self._rotary_tables.items()
            return LayerInputs(common, {kind: Rotation(cos, sin, positions) for kind, (cos, sin) in tables})
        rotary = {kind: (cos[position_ids], sin[position_ids]) for kind, (cos, sin) in self._rotary_tables.items()}
        return LayerInputs(common, rotary)

    def keep_rotations(self, max_positions: int) -> None:
        """Compute the rotations of all positions up to there once, where they depend on nothing else.

        The library computes them anew for every step, which takes as long as a quarter of a layer."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope] if "rope_type" in rope or not rope else list(rope.values())
        fixed = all(kind.get("rope_type", "default") in FIXED_ROPE for kind in kinds)
        if self._rotary is not None and fixed and max_positions <= MOST_KEPT_POSITIONS:
            every = self._rotations(torch.arange(max_positions, device=self.device).unsqueeze(0))
            if all(isinstance(pair, tuple) and len(pair) == 2 for pair in every.values()):  # DeepSeek V2 has one tensor
                self._rotary_tables = {kind: (cos[0].clone(), sin[0].clone()) for kind, (cos, sin) in every.items()}

    def turn_by_table(self) -> None:
        """From now on layers are handed the kept rotations as they are, where the view lets them: all layers must be
        fused. Nothing changes where rotations are not kept, or turn a part of each head only."""
        layers: list[Any] = list(self.layers)
        sizes = {layer.self_attn.head_dim for layer in layers}
        kept = () if self._rotary_tables is None else self._rotary_tables.values()
        self._turns_by_table = bool(kept) and all({cos.shape[-1]} == sizes for cos, _ in kept)

    def _rotations(self, position_ids: torch.Tensor) -> dict[str | None, Any]:
        """cos and sin for each layer type, by the library."""
        like = torch.empty(1, 1, dtype=self.dtype, device=self.device)  # only its dtype and device are read
        return {
            kind: self._rotary(*((like, position_ids) if kind is None else (like, position_ids, kind)))
            for kind in self._layer_types
        }

    def run_layers(
        self,
        states: torch.Tensor,
        start: int,
        stop: int,
        inputs: LayerInputs,
        *,
        tapped: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Layers `start` up to `stop`, states [1, T, D] in and out. Writes their KV through the view.

        The keys of `tapped` are layer counts: where so many have run, the states [T, D] are left under it."""
        for index in range(start, stop):
            states = self._run_layer(index, states, inputs)
            if tapped is not None and index + 1 in tapped:
                tapped[index + 1] = states[0]
        return states

    def project_kv(self, states: Callable[[int], torch.Tensor], start: int, stop: int, inputs: LayerInputs) -> None:
        """Writes what layers `start` up to `stop` would cache for `states(layer)`, [1, T, D], and runs no more of them.

        `inputs` must be made with a view that ends the layer once K and V are written."""
        for index in range(start, stop):
            try:
                self._run_layer(index, states(index), inputs)
            except KVWritten:
                continue
            raise ModelError(f"layer {index}", type(self.layers[index]).__name__, "a layer that caches K and V")

    def _run_layer(self, index: int, states: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        if inputs.rotary:
            kind = None if None in inputs.rotary else self.config.layer_types[index]
            out = self.layers[index](states, position_embeddings=inputs.rotary[kind], **inputs.common)
        else:
            out = self.layers[index](states, **inputs.common)
        return out[0] if isinstance(out, tuple) else cast(torch.Tensor, out)

    def norm(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm: [..., D] -> [..., D]. Some old OPT models have none."""
        return states if self._norm is None else cast(torch.Tensor, self._norm(states))

    @property
    def plain_norm(self) -> tuple[torch.Tensor, float] | None:
        """Weight and epsilon of the final norm, where it is the Llama one."""
        norm = self._norm
        return (norm.weight, norm.variance_epsilon) if norm is not None and is_plain_rms_norm(norm) else None

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed states to logits over the whole vocabulary, with the model's own scaling: [..., D] -> [..., V]."""
        if self.family.finish is not None:
            normed = self.family.finish(self.backbone, normed)
        logits = cast(torch.Tensor, self._head(normed))
        return logits if self.scale_logits is None else self.scale_logits(logits)

    @property
    def head_rows(self) -> torch.Tensor:
        """The output embedding, [V, D]."""
        return cast(torch.Tensor, self._head.weight)

    def narrow_head(self, token_ids: torch.Tensor) -> NarrowHead:
        """The head for these token ids alone, as a module of its own: [..., D] -> [..., number of ids]."""
        return NarrowHead(self, token_ids)

    def _rotary_layer_types(self) -> tuple[str | None, ...]:
        """Gemma 3 keeps one rotary embedding per layer type; the others one for all."""
        if type(self.model).__name__ != "Gemma3ForCausalLM":
            return (None,)
        return tuple(dict.fromkeys(self.config.layer_types))


class NarrowHead(nn.Module):
    """Some rows of the model's output embedding, copied, with the model's own scaling around them."""

    def __init__(self, adapter: ModelAdapter, token_ids: torch.Tensor) -> None:
        super().__init__()
        whole = adapter._head
        rows, bias = weight_rows(whole, token_ids), getattr(whole, "bias", None)
        self.linear = nn.Linear(rows.shape[1], len(rows), bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            added = bias.detach()[token_ids.to(bias.device)].contiguous()
            self.linear.bias = nn.Parameter(added, requires_grad=False)
        self._finish = adapter.family.finish
        self._backbone = (adapter.backbone,)  # in a tuple, so that it does not count as a part of this module
        self._scale = adapter.scale_logits

    @property
    def plain_linear(self) -> nn.Linear | None:
        """All that it does, where that is a linear alone."""
        return self.linear if self._finish is None and self._scale is None else None

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        if self._finish is not None:
            normed = self._finish(self._backbone[0], normed)
        logits: torch.Tensor = self.linear(normed)
        return logits if self._scale is None else self._scale(logits)

    __call__ = forward


def _logit_scaling(family: Family, config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the model does to its logits: a factor of its family, or Gemma's soft-cap; None for most."""
    if family.scale is not None:
        return partial(family.scale, config)
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else lambda logits: torch.tanh(logits / cap) * cap
