"""A tiny random model of every family the engine knows. Nothing is downloaded."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as hf

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GQA = {**COMMON, "num_key_value_heads": 2}
MLA = {
    **COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GRANITE = {
    **GQA,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.5,
    "logits_scaling": 2.5,
}
FALCON = {k: v for k, v in COMMON.items() if k != "intermediate_size"}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GQA),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**GQA, "tie_word_embeddings": True, "attention_bias": True}),
    "deepseek_r1_distill_llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **GQA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**GQA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **GQA,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": None}),
    "mistral_window": ("MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": 6}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 6,
            "attn_logit_softcapping": 0.5,  # small enough to bend the scores of so small a model
            "final_logit_softcapping": 1.0,
            "attn_implementation": "eager",  # transformers before 5.22 takes sdpa, which leaves the soft-cap out
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            **GQA,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**GRANITE, "tie_word_embeddings": True}),
    "granite_moe": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GQA),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**GQA, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    ),
    "stablelm_parallel": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**GQA, "partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**GQA, "sliding_window": 7}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**GQA, "sliding_window": 7, "logit_scale": 0.5}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GQA, "head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**GQA, "head_dim": 16}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 384,
            "n_embd": 48,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON, "use_parallel_residual": True}),
    "gpt_neox_serial": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON, "use_parallel_residual": False}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**COMMON, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GQA, "sliding_window": None}),
    "phi3_longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **GQA,
            "sliding_window": None,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "falcon_multi_query": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
    ),
    "falcon_new_layout": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "falcon_alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            **FALCON,
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": True},
    ),
    "opt_projected": (
        "OPTForCausalLM",
        "OPTConfig",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**MLA, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**MLA, "n_group": 2}),
}
FAMILIES = tuple(CONFIGS)


@functools.cache
def tiny_model(name: str) -> Any:
    """Random weights, equal every time; norms and biases are random too, so that leaving one out is seen."""
    model_class, config_class, settings = CONFIGS[name]
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(hf, model_class)(getattr(hf, config_class)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
    model.generation_config.eos_token_id = None  # runs to its length: more tokens compared
    return model.requires_grad_(False)
