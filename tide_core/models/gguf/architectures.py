"""Map a GGUF to Hugging Face: its configuration, and the weight for each tensor.

What differs between architectures is a line of `ARCHITECTURES`. A setting or tensor that is not listed may change the
forward, so it is refused.

llama.cpp rotates neighbouring pairs of a Llama head's values, Hugging Face the two halves of the head, so the rows of
Llama's q and k projections have another order in a GGUF (the other architectures keep theirs):

    in the file   r0 i0 r1 i1 r2 i2 ...        in the folder   r0 r1 r2 ... i0 i1 i2 ...

Norms of Gemma multiply by one more than their weight; the file holds the factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tide_core.errors import ModelError
from tide_core.kernels.panels import KINDS
from tide_core.models.gguf import rope
from tide_core.models.gguf.file import GGUFFile, TensorInfo

KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    *rope.KEYS,
}
"""Settings that every architecture may have."""
GEMMA_PERIOD = 6
"""One of so many layers of a Gemma 3 attends to everything, unless the file says otherwise."""
GEMMA_27B_LAYERS = 62
"""The one size of Gemma 3 whose attention is scaled by width / heads instead of by the head's size."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the layers of an architecture are stored, and what they become."""

    name: str
    model_class: str
    config_class: str
    keys: frozenset[str] = frozenset()
    """Settings beside `KEYS`."""
    pairs: bool = False
    """Whether rows of q and k are stored as pairs."""
    biased: bool = False
    """Whether q, k and v always have a bias."""
    fused: bool = False
    """Whether q, k and v are one matrix, and gate and up another."""
    head_norms: bool = False
    """Whether q and k are normed by head."""
    output_norms: bool = False
    """Whether what attention and the MLP add is normed, too."""
    norm_offset: float = 0.0
    """By how much norms in the file exceed the weights."""


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "LlamaForCausalLM", "LlamaConfig", frozenset({"tensor_data_layout"}), pairs=True),
        Architecture("qwen2", "Qwen2ForCausalLM", "Qwen2Config", biased=True),
        Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_norms=True),
        Architecture(
            "gemma3",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}),
            head_norms=True,
            output_norms=True,
            norm_offset=1.0,
        ),
        Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", frozenset({"attention.sliding_window"}), fused=True),
    )
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the folder."""

    name: str
    source: str
    shape: tuple[int, ...]
    num_heads: int | None = None
    """Set if its rows must be reordered."""
    offset: float = 0.0
    """By how much the file's values exceed the weight."""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Arguments of the configuration class, without the token ids, and the weights in file order."""

    architecture: Architecture
    config: dict[str, Any]
    weights: list[Weight]


def describe(file: GGUFFile) -> GGUFModel:
    """Read the configuration and check that exactly the expected tensors exist, with their shapes."""
    name = file.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelError(f"{file.path}: general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
    config, sizes = _config(file, architecture)
    weights = list(_weights(architecture, config, sizes))
    expected = {weight.source for weight in weights} | set(rope.TENSORS)
    for tensor in file.tensors:
        if tensor not in expected:
            raise ModelError(f"{file.path}: tensor {tensor}", "an unknown tensor", f"the tensors of a dense {name}")
    for weight in weights:
        if weight.source not in file.tensors:
            raise ModelError(f"{file.path}: tensor {weight.source}", None, "this tensor to be present")
        shape = file.tensors[weight.source].shape
        if shape != weight.shape:
            raise ModelError(f"{file.path}: tensor {weight.source}", shape, f"shape {weight.shape} by the metadata")
    return GGUFModel(architecture, config, weights)


def read_weight(file: GGUFFile, weight: Weight) -> npt.NDArray[np.float32]:
    values = file.read(weight.source)
    if weight.offset:
        values = values - np.float32(weight.offset)
    if weight.num_heads is None:
        return values
    pairs = values.reshape(weight.num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def stays_quantised(info: TensorInfo, weight: Weight) -> bool:
    """Whether it is a matrix that the native kernels read as it is in its file."""
    return info.kind.name in KINDS and len(weight.shape) == 2


@dataclass(frozen=True, slots=True)
class _Sizes:
    head_dim: int
    attention_bias: bool
    """Of all four projections of Llama."""
    mlp_bias: bool


def _config(file: GGUFFile, architecture: Architecture) -> tuple[dict[str, Any], _Sizes]:
    name = architecture.name
    for key, value in file.metadata.items():
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in KEYS | architecture.keys:
            supported = f"only settings that the Hugging Face {architecture.model_class} supports"
            raise ModelError(f"{file.path}: {key}", value, supported)
    if file.integer(f"{name}.expert_count", 0) > 0:
        raise ModelError(f"{file.path}: {name}.expert_count", file.integer(f"{name}.expert_count"), "0: a dense model")
    hidden = file.integer(f"{name}.embedding_length", low=1)
    num_heads = file.integer(f"{name}.attention.head_count", low=1)
    num_kv_heads = file.integer(f"{name}.attention.head_count_kv", num_heads, low=1)
    if num_heads % num_kv_heads:
        raise ModelError(f"{file.path}: {name}.attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}")
    sizes = _Sizes(
        _head_dim(file, architecture, hidden, num_heads),
        "blk.0.attn_q.bias" in file.tensors,
        "blk.0.ffn_gate.bias" in file.tensors,
    )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight", None, "this tensor to be present")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    if file.integer(f"{name}.vocab_size", vocab_size) != vocab_size:
        raise ModelError(f"{file.path}: {name}.vocab_size", file.integer(f"{name}.vocab_size"), f"{vocab_size} rows")
    config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{name}.feed_forward_length", low=1),
        "num_hidden_layers": file.integer(f"{name}.block_count", low=1, high=4096),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": file.integer(f"{name}.context_length", low=1),
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return {**config, **_particulars(file, config, sizes)}, sizes


def _head_dim(file: GGUFFile, architecture: Architecture, hidden: int, num_heads: int) -> int:
    name = architecture.name
    if f"{name}.attention.key_length" not in file.metadata and hidden % num_heads:
        raise ModelError(f"{file.path}: {name}.attention.head_count", num_heads, f"a divisor of the width {hidden}")
    head_dim = file.integer(f"{name}.attention.key_length", hidden // num_heads, low=2)
    same = [f"{name}.attention.value_length"]
    if not architecture.fused:  # Phi-3 may rotate a part of the head
        same.append(f"{name}.rope.dimension_count")
    for key in same:
        if file.integer(key, head_dim) != head_dim or head_dim % 2:
            raise ModelError(f"{file.path}: {key}", file.integer(key, head_dim), f"the even head size {head_dim}")
    if name in ("qwen2", "phi3") and head_dim * num_heads != hidden:
        raise ModelError(f"{file.path}: {name}.attention.key_length", head_dim, f"{hidden} / {num_heads} heads")
    return head_dim


def _particulars(file: GGUFFile, config: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Arguments that the configurations of the architectures do not share."""
    name, head_dim = file.text("general.architecture"), sizes.head_dim
    if name == "llama":
        scaled = rope.read(file, head_dim)
        biases = {"attention_bias": sizes.attention_bias, "mlp_bias": sizes.mlp_bias}
        return {"head_dim": head_dim, "rope_parameters": scaled, **biases}
    if name == "qwen3":
        return {"head_dim": head_dim, "rope_parameters": rope.read(file, head_dim)}
    if name == "gemma3":
        return _gemma(file, config, head_dim)
    if name == "phi3":
        window = file.integer("phi3.attention.sliding_window", 0)
        return {"sliding_window": window or None, **rope.read_phi3(file, head_dim, config["max_position_embeddings"])}
    return {"rope_parameters": rope.read(file, head_dim)}


def _gemma(file: GGUFFile, config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern", GEMMA_PERIOD)
    if isinstance(pattern, list):
        slides = [bool(each) for each in file.numbers("gemma3.attention.sliding_window_pattern", num_layers)]
    else:
        period = file.integer("gemma3.attention.sliding_window_pattern", GEMMA_PERIOD, low=1)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    is_27b = num_layers == GEMMA_27B_LAYERS
    local = {"rope_type": "default", "rope_theta": file.number("gemma3.rope.freq_base_swa", 10000.0)}
    return {
        "head_dim": head_dim,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
        "sliding_window": file.integer("gemma3.attention.sliding_window", low=1),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {
            "full_attention": rope.read(file, head_dim, theta=1000000.0),
            "sliding_attention": local,
        },
    }


def _weights(architecture: Architecture, config: dict[str, Any], sizes: _Sizes) -> Iterator[Weight]:
    hidden, offset = config["hidden_size"], architecture.norm_offset

    def norm(name: str, source: str, size: int = hidden) -> Weight:
        return Weight(f"{name}.weight", f"{source}.weight", (size,), offset=offset)

    yield Weight("model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        to, source = f"model.layers.{layer}.", f"blk.{layer}."
        yield norm(to + "input_layernorm", source + "attn_norm")
        if architecture.output_norms:
            yield norm(to + "post_attention_layernorm", source + "post_attention_norm")
            yield norm(to + "pre_feedforward_layernorm", source + "ffn_norm")
            yield norm(to + "post_feedforward_layernorm", source + "post_ffw_norm")
        else:
            yield norm(to + "post_attention_layernorm", source + "ffn_norm")
        if architecture.head_norms:
            yield norm(to + "self_attn.q_norm", source + "attn_q_norm", sizes.head_dim)
            yield norm(to + "self_attn.k_norm", source + "attn_k_norm", sizes.head_dim)
        for name, tensor, rows, columns, heads, bias in _products(architecture, config, sizes):
            yield Weight(f"{to}{name}.weight", f"{source}{tensor}.weight", (rows, columns), heads)
            if bias:
                yield Weight(f"{to}{name}.bias", f"{source}{tensor}.bias", (rows,), heads)
    yield norm("model.norm", "output_norm")
    if not config["tie_word_embeddings"]:
        yield Weight("lm_head.weight", "output.weight", (config["vocab_size"], hidden))


def _products(
    architecture: Architecture, config: dict[str, Any], sizes: _Sizes
) -> Iterator[tuple[str, str, int, int, int | None, bool]]:
    """Name, tensor, rows and columns of the matrices of a layer, the heads whose rows are pairs, and whether there is a
    bias."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (config[f"num_{kind}_heads"] * sizes.head_dim for kind in ("attention", "key_value"))
    of_q, of_k = (config[f"num_{kind}_heads"] if architecture.pairs else None for kind in ("attention", "key_value"))
    is_llama = architecture.name == "llama"
    qkv_bias = architecture.biased or (is_llama and sizes.attention_bias)
    mlp_bias = is_llama and sizes.mlp_bias
    if architecture.fused:
        yield "self_attn.qkv_proj", "attn_qkv", q_size + 2 * kv_size, hidden, None, False
    else:
        yield "self_attn.q_proj", "attn_q", q_size, hidden, of_q, qkv_bias
        yield "self_attn.k_proj", "attn_k", kv_size, hidden, of_k, qkv_bias
        yield "self_attn.v_proj", "attn_v", kv_size, hidden, None, qkv_bias
    yield "self_attn.o_proj", "attn_output", hidden, q_size, None, is_llama and sizes.attention_bias
    if architecture.fused:
        yield "mlp.gate_up_proj", "ffn_up", 2 * inner, hidden, None, False
    else:
        yield "mlp.gate_proj", "ffn_gate", inner, hidden, None, mlp_bias
        yield "mlp.up_proj", "ffn_up", inner, hidden, None, mlp_bias
    yield "mlp.down_proj", "ffn_down", hidden, inner, None, mlp_bias


def total_bytes(weights: list[Weight]) -> int:
    """Of the weights in float32."""
    return 4 * sum(math.prod(weight.shape) for weight in weights)
