"""Map a llama-architecture GGUF to Hugging Face: its configuration, and the weight for each tensor.

llama.cpp rotates neighbouring pairs of a head's values, Hugging Face the two halves of the head, so the rows of the
q and k projections have another order in a GGUF:

    in the file   r0 i0 r1 i1 r2 i2 ...        in the folder   r0 r1 r2 ... i0 i1 i2 ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tide_core.errors import ModelError
from tide_core.models.gguf.file import GGUFFile

ARCHITECTURE = "llama"

# Any other llama.* key may change the forward in a way that the Hugging Face Llama does not support.
KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
ROPE_FACTORS = "rope_freqs.weight"
# The scaling rule of Llama 3.1 to 3.3; the file holds only its result, one factor per frequency.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the folder. `num_heads` is set if its rows must be reordered."""

    name: str
    source: str
    shape: tuple[int, ...]
    num_heads: int | None = None


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """Arguments of LlamaConfig, without the token ids, and the weights in file order."""

    config: dict[str, Any]
    weights: list[Weight]


def describe(file: GGUFFile) -> LlamaModel:
    """Read the configuration and check that exactly the expected tensors exist, with their shapes."""
    config = _config(file)
    weights = list(_weights(config))
    expected = {weight.source for weight in weights} | {ROPE_FACTORS}
    for name in file.tensors:
        if name not in expected:
            raise ModelError(f"{file.path}: tensor {name}", "an unknown tensor", "the tensors of a dense llama")
    for weight in weights:
        if weight.source not in file.tensors:
            raise ModelError(f"{file.path}: tensor {weight.source}", None, "this tensor to be present")
        shape = file.tensors[weight.source].shape
        if shape != weight.shape:
            raise ModelError(f"{file.path}: tensor {weight.source}", shape, f"shape {weight.shape} by the metadata")
    return LlamaModel(config, weights)


def read_weight(file: GGUFFile, weight: Weight) -> npt.NDArray[np.float32]:
    values = file.read(weight.source)
    if weight.num_heads is None:
        return values
    pairs = values.reshape(weight.num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _config(file: GGUFFile) -> dict[str, Any]:
    architecture = file.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(f"{file.path}: general.architecture", architecture, f"{ARCHITECTURE!r}")
    for key, value in file.metadata.items():
        if key.startswith("llama.") and key.removeprefix("llama.") not in KNOWN_KEYS:
            raise ModelError(f"{file.path}: {key}", value, "only settings that the Hugging Face Llama supports")
    if file.integer("llama.expert_count", 0) > 0:
        raise ModelError(f"{file.path}: llama.expert_count", file.integer("llama.expert_count"), "0: a dense llama")
    hidden = file.integer("llama.embedding_length", low=1)
    num_heads = file.integer("llama.attention.head_count", low=1)
    num_kv_heads = file.integer("llama.attention.head_count_kv", num_heads, low=1)
    if num_heads % num_kv_heads:
        raise ModelError(f"{file.path}: llama.attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads} heads")
    head_dim = file.integer("llama.attention.key_length", hidden // num_heads, low=2)
    if "llama.attention.key_length" not in file.metadata and hidden % num_heads:
        raise ModelError(f"{file.path}: llama.attention.head_count", num_heads, f"a divisor of the width {hidden}")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.integer(key, head_dim) != head_dim or head_dim % 2:
            raise ModelError(f"{file.path}: {key}", file.integer(key, head_dim), f"the even head size {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight", None, "this tensor to be present")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    if file.integer("llama.vocab_size", vocab_size) != vocab_size:
        raise ModelError(f"{file.path}: llama.vocab_size", file.integer("llama.vocab_size"), f"{vocab_size} embeddings")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": file.integer("llama.feed_forward_length", low=1),
        "num_hidden_layers": file.integer("llama.block_count", low=1, high=4096),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.integer("llama.context_length", low=1),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = file.number("llama.rope.freq_base", 10000.0)
    kind = file.text("llama.rope.scaling.type", "linear" if "llama.rope.scale_linear" in file.metadata else "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ModelError(
                f"{file.path}: {ROPE_FACTORS}", f"together with rope scaling {kind}", "one kind of scaling"
            )
        return {"rope_theta": theta, **_llama3_rope(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: llama.rope.scaling.type", kind, "none, linear or yarn")
    has_factor = "llama.rope.scaling.factor" in file.metadata
    factor = file.number("llama.rope.scaling.factor" if has_factor else "llama.rope.scale_linear")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = file.integer("llama.rope.scaling.original_context_length", low=1)
        rope["original_max_position_embeddings"] = context
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 rule that gives the factors in the file; factors of another rule are refused."""
    shape = file.tensors[ROPE_FACTORS].shape
    if shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS}", shape, f"shape {(head_dim // 2,)}")
    found = file.read(ROPE_FACTORS).astype(np.float64)
    factor = float(str(found.max().astype(np.float32)))
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_CONTEXT / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    if factor < 1 or not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS}", found.tolist(), "the frequency factors of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _weights(config: dict[str, Any]) -> Iterator[Weight]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    yield Weight("model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        to, source = f"model.layers.{layer}.", f"blk.{layer}."
        yield Weight(to + "input_layernorm.weight", source + "attn_norm.weight", (hidden,))
        yield Weight(to + "post_attention_layernorm.weight", source + "ffn_norm.weight", (hidden,))
        for name, tensor, rows, columns, heads, bias in (
            ("self_attn.q_proj", "attn_q", q_size, hidden, num_heads, config["attention_bias"]),
            ("self_attn.k_proj", "attn_k", kv_size, hidden, num_kv_heads, config["attention_bias"]),
            ("self_attn.v_proj", "attn_v", kv_size, hidden, None, config["attention_bias"]),
            ("self_attn.o_proj", "attn_output", hidden, q_size, None, config["attention_bias"]),
            ("mlp.gate_proj", "ffn_gate", inner, hidden, None, config["mlp_bias"]),
            ("mlp.up_proj", "ffn_up", inner, hidden, None, config["mlp_bias"]),
            ("mlp.down_proj", "ffn_down", hidden, inner, None, config["mlp_bias"]),
        ):
            yield Weight(f"{to}{name}.weight", f"{source}{tensor}.weight", (rows, columns), heads)
            if bias:
                yield Weight(f"{to}{name}.bias", f"{source}{tensor}.bias", (rows,), heads)
    yield Weight("model.norm.weight", "output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Weight("lm_head.weight", "output.weight", (config["vocab_size"], hidden))
