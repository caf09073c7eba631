"""The supported model families: where each has its modules. Tests show that the engine's forward equals transformers'.

Layers, norms and rotary embeddings are transformers' own modules. A family describes how to reach them and what runs
between them: how tokens are embedded, which argument passes the cache, whether the layer calls the attention registry.
Every entry has a test in tests/models/test_families.py; an architecture without an entry is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tide_core.errors import ModelError

Module = Any  # modules of transformers are untyped


@dataclass(frozen=True, slots=True)
class Family:
    """Attribute paths of a family's modules, relative to the causal LM or to its backbone."""

    name: str
    backbone: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    cache_argument: str = "past_key_values"
    attention: str = "paged"
    """paged: the layer calls the attention registry with the cached K and V.
    sinks: the same, and every head has a sink, for which plain Torch attention over the pages has a parameter.
    latent: the layer expands K and V from its cached latents, then calls the registry.
    inline: the layer computes its attention itself, with a mask tensor."""
    embed: Callable[[Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Token ids and positions, [1, T], to the state that enters layer 0; None: `embed_tokens` alone."""
    finish: Callable[[Module, torch.Tensor], torch.Tensor] | None = None
    """Applied between the final norm and the output embedding."""
    scale: Callable[[Module, torch.Tensor], torch.Tensor] | None = None
    """Applied to the logits, with the config as first argument."""


def _embed_gpt2(backbone: Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return backbone.wte(ids) + backbone.wpe(positions)  # type: ignore[no-any-return]


def _embed_opt(backbone: Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    states = backbone.embed_tokens(ids)
    if backbone.project_in is not None:
        states = backbone.project_in(states)
    return states + backbone.embed_positions(None, 0, position_ids=positions)  # type: ignore[no-any-return]


def _finish_opt(backbone: Module, states: torch.Tensor) -> torch.Tensor:
    return states if backbone.project_out is None else backbone.project_out(states)


def _embed_neox(backbone: Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return backbone.embed_in(ids)  # type: ignore[no-any-return]


def _embed_falcon(backbone: Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return backbone.word_embeddings(ids)  # type: ignore[no-any-return]


def _embed_granite(backbone: Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return backbone.embed_tokens(ids) * backbone.embedding_multiplier  # type: ignore[no-any-return]


def _scale_granite(config: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits / config.logits_scaling  # type: ignore[no-any-return]


def _scale_cohere(config: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits * config.logit_scale  # type: ignore[no-any-return]


FAMILIES = {
    "LlamaForCausalLM": Family("Llama (and DeepSeek R1 distills of its shape)"),
    "Qwen2ForCausalLM": Family("Qwen2 (and DeepSeek R1 distills of its shape)"),
    "Qwen3ForCausalLM": Family("Qwen3"),
    "Qwen3MoeForCausalLM": Family("Qwen3-MoE"),
    "MistralForCausalLM": Family("Mistral"),
    "MixtralForCausalLM": Family("Mixtral"),
    "Gemma2ForCausalLM": Family("Gemma 2"),
    "Gemma3ForCausalLM": Family("Gemma 3 (text)"),
    "PhiForCausalLM": Family("Phi", norm="final_layernorm"),
    "Phi3ForCausalLM": Family("Phi-3"),
    "SmolLM3ForCausalLM": Family("SmolLM3"),
    "GraniteForCausalLM": Family("Granite", embed=_embed_granite, scale=_scale_granite),
    "GraniteMoeForCausalLM": Family("Granite MoE", embed=_embed_granite, scale=_scale_granite),
    "Olmo2ForCausalLM": Family("OLMo 2"),
    "StableLmForCausalLM": Family("StableLM"),
    "Starcoder2ForCausalLM": Family("StarCoder2"),
    "Cohere2ForCausalLM": Family("Cohere 2", scale=_scale_cohere),
    "GlmForCausalLM": Family("GLM"),
    "Glm4ForCausalLM": Family("GLM-4"),
    "GptOssForCausalLM": Family("gpt-oss", attention="sinks"),
    "DeepseekV2ForCausalLM": Family("DeepSeek V2", attention="latent"),
    "DeepseekV3ForCausalLM": Family("DeepSeek V3", attention="latent"),
    "GPT2LMHeadModel": Family("GPT-2", backbone="transformer", layers="h", norm="ln_f", embed=_embed_gpt2),
    "GPTNeoXForCausalLM": Family(
        "GPT-NeoX (Pythia)",
        backbone="gpt_neox",
        norm="final_layer_norm",
        cache_argument="layer_past",
        embed=_embed_neox,
    ),
    "OPTForCausalLM": Family(
        "OPT", backbone="model.decoder", norm="final_layer_norm", embed=_embed_opt, finish=_finish_opt
    ),
    "FalconForCausalLM": Family(
        "Falcon",
        backbone="transformer",
        layers="h",
        norm="ln_f",
        cache_argument="layer_past",
        attention="inline",
        embed=_embed_falcon,
    ),
}


UNPROVEN_SETTINGS = (
    "use_bidirectional_attention",
    "add_cross_attention",
    "reorder_and_upcast_attn",
    "quantization_config",
)


def find_family(model: Module) -> Family:
    """The family of a loaded model; an unknown architecture raises ModelError with the known ones."""
    architecture = type(model).__name__
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError("architecture", architecture, f"one of {', '.join(sorted(FAMILIES))}")
    _refuse_unproven_variants(architecture, model.config)
    return family


def _refuse_unproven_variants(architecture: str, config: Any) -> None:
    """Refuse settings of a known family that change the forward in a way that no test covers."""
    for setting in UNPROVEN_SETTINGS:
        value = getattr(config, setting, False)
        if value:
            raise ModelError(f"{architecture} config.{setting}", value, "it unset")
    # SmolLM3's mask has a window for such layers even where windows are switched off.
    if architecture == "SmolLM3ForCausalLM" and not config.use_sliding_window:
        types = set(config.layer_types)
        if types != {"full_attention"}:
            expected = "windows only with use_sliding_window"
            raise ModelError(f"{architecture} config.layer_types", sorted(types), expected)


def falcon_mask(backbone: Module, view: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The mask that Falcon's attention adds to its scores, and its alibi argument (None with rotary positions)."""
    blocked = torch.finfo(dtype).min
    visible = view.mask[None, None]  # [1, 1, T, contexts]
    if not backbone.use_alibi:
        return torch.where(visible, 0.0, blocked).to(dtype), None
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    positions = view.context_positions
    longest = torch.ones(1, int(positions.max()) + 1, device=positions.device, dtype=torch.long)
    slopes = build_alibi_tensor(longest, backbone.num_heads, dtype=dtype)[:, :, positions]  # [H, 1, contexts]
    head_size = backbone.config.hidden_size // backbone.num_heads
    mask = torch.where(visible, (slopes / math.sqrt(head_size))[None], blocked).to(dtype)
    return mask, slopes
