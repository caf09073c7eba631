"""Tiny GGUF files, written by the gguf package, beside the Hugging Face model they must become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 64, 96, 4, 2, 16, 2, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "o r", "Ġw or"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
    "phi3": (Phi3ForCausalLM, Phi3Config),
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}


def byte_vocab() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def byte_level_metadata() -> dict[str, Any]:
    tokens = byte_vocab()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def model_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": HEAD_DIM,
    }


@dataclass(frozen=True)
class TinyGGUF:
    path: Path
    model: PreTrainedModel
    """The same weights, put into transformers without passing through the file."""


def make_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
    **config: Any,
) -> TinyGGUF:
    """`metadata` and `tensors` are added or replace others, `drop` names keys and tensors to leave out, `config`
    goes to LlamaConfig."""
    pairs = {**model_metadata(), **byte_level_metadata(), **(metadata or {})}
    model = reference_model(len(pairs.get("tokenizer.ggml.tokens", [])) or 8, **config)
    model.load_state_dict({name: _through(value, kind) for name, value in model.state_dict().items()})
    left_out = set(drop)
    writer = GGUFWriter(path, architecture)
    for key, value in pairs.items():
        if key not in left_out:
            _add(writer, key, value)
    given = dict(tensors or {})
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        target = gguf_name(name)
        if target in left_out or target in given:
            continue
        array = _to_gguf_rows(name, value.numpy())
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, quantize(array, kind), raw_dtype=kind)
    for name, array in given.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGGUF(path, model)


def reference_model(vocab_size: int, **config: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that attention matters: a wrong row order must show in the logits.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + ("norm" in name))
    return model


def make_family_gguf(
    path: Path,
    architecture: str,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> TinyGGUF:
    """Of an architecture other than llama, whose rows are in the order of Hugging Face. `metadata` goes into the file,
    without the prefix of the architecture; `config` to the configuration class."""
    model_class, config_class = FAMILIES[architecture]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, "vocab_size": len(byte_vocab()), **config})).eval()
    is_gemma = architecture == "gemma3"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and not is_gemma else 0.0
            value = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + centre
            parameter.copy_(_through(value, kind))
    writer = GGUFWriter(path, architecture)
    sizes = {key.removeprefix("llama."): value for key, value in model_metadata().items()}
    for key, value in {**sizes, **(metadata or {})}.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in byte_level_metadata().items():
        _add(writer, key, value)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = value.numpy() + (1.0 if is_gemma and "norm" in name else 0.0)
        target, array = gguf_name(name, GEMMA_NAMES if is_gemma else NAMES), stored.astype(np.float32)
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, quantize(array, kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGGUF(path, model)


def gguf_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[module]}.{kind}"


def _to_gguf_rows(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp's order of the q and k rows: the two halves of a head interleaved."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    halves = values.reshape(-1, 2, HEAD_DIM // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _through(value: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    if value.ndim == 1 or kind == GGMLQuantizationType.F32:
        return value
    return torch.from_numpy(dequantize(quantize(value.numpy(), kind), kind))


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
