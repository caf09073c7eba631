"""Compute the `ModelIdentity` of a loaded model: equal on every machine and library version.

Configuration and tokenizer are hashed by content, not by their files, whose bytes depend on the version of transformers
that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch

from tide_core.errors import ModelError
from tide_core.identity import ModelIdentity
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.panels import Panels
from tide_core.models import model_cache
from tide_core.models.adapter import ModelAdapter
from tide_core.models.folder import weight_files
from tide_core.models.fp8.scheme import fp8_scheme
from tide_core.models.resolver import ResolvedModel
from tide_core.models.weights import named_weights

NUM_SAMPLED_WEIGHTS = 32
NUM_SAMPLED_VALUES = 8

# Settings that the forward of the known families depends on. A list of exclusions would break with every key that a
# library version adds. If a key of a future family is missing here, the weights still distinguish models.
CONFIG_KEYS = (
    # sizes
    *("model_type", "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "ffn_dim"),
    *("ffn_hidden_size", "num_hidden_layers", "n_layer", "word_embed_proj_dim", "max_position_embeddings"),
    *("n_positions", "tie_word_embeddings"),
    # attention
    *("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "head_dim", "multi_query"),
    *("new_decoder_architecture", "alibi", "attention_bias", "bias", "qk_layernorm", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "layer_types"),
    *("sliding_window", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("attention_multiplier", "use_qkv_bias"),
    # positions
    *("rope_parameters", "rope_interleave", "original_max_position_embeddings", "no_rope_layers"),
    # norms, activations, order
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine"),
    *("do_layer_norm_before", "_remove_final_layer_norm", "num_ln_in_parallel_attn", "parallel_attn"),
    *("use_parallel_residual", "hidden_act", "hidden_activation", "activation", "activation_function", "mlp_bias"),
    *("enable_bias", "final_logit_softcapping", "use_bias", "norm_epsilon"),
    # factors
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    # experts
    *("num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("first_k_dense_replace", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor"),
    *("decoder_sparse_step", "mlp_only_layers", "swiglu_alpha", "swiglu_limit"),
)
FORMER_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Settings that versions of the library have as constants: of this value they count as absent."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def identify(model: Any, tokenizer: Any, resolved: ResolvedModel | None) -> ModelIdentity:
    """The identity of a loaded model. `resolved`: its source; None if it was never on disk."""
    adapter = ModelAdapter(model, paged=False)
    return ModelIdentity(
        name=resolved.name if resolved is not None else type(model).__name__,
        architecture=type(model).__name__,
        num_layers=adapter.num_layers,
        width=int(model.config.hidden_size),
        vocab_size=adapter.vocab_size,
        config_sha256=config_digest(model.config),
        tokenizer_sha256=tokenizer_digest(tokenizer),
        revision=_revision(resolved),
        # Of weights that are not those of the files, or not in the form that an artefact may know, sampled values tell.
        weights_sha256=None if resolved is None or _differs_from_files(model, resolved) else weights_digest(resolved),
        weights_sample=weights_sample(model),
        dtype=str(adapter.dtype).removeprefix("torch."),
    )


def config_digest(config: Any) -> str:
    """Digest of the settings that the forward depends on. None and false count as absent, so that a flag that a library
    version adds as false changes nothing."""
    values = {
        key: value
        for key, value in config.to_dict().items()
        if value is not None and value is not False and value != FORMER_CONSTANTS.get(key)
    }
    return _digest(_canonical({key: values[key] for key in CONFIG_KEYS if key in values}))


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the ids of all tokens, the merges, and the tokens that begin and end a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = json.loads(backend.to_str())["model"] if backend is not None else {}
    vocabulary = inner.get("vocab")
    return _digest(
        {
            "ids": sorted(tokenizer.get_vocab().items()),
            "kind": inner.get("type"),
            "merges": [m.split(" ") if isinstance(m, str) else m for m in inner.get("merges") or ()],
            "scores": _canonical(vocabulary) if isinstance(vocabulary, list) else None,  # of unigram models
            "ends": [_text(tokenizer.bos_token), _text(tokenizer.eos_token)],
        }
    )


def weights_digest(resolved: ResolvedModel) -> str:
    """Digest over the digests of the weight files, by name: from the checked manifest, else by reading."""
    manifest = model_cache.read_manifest(resolved.path) if resolved.source in ("demo", "gguf") else None
    whole = hashlib.sha256()
    if resolved.gguf is not None and manifest is not None:
        whole.update(f"as they are in {manifest['source']['sha256']}\n".encode())
        return whole.hexdigest()
    listed = manifest["files"] if manifest is not None else {}
    try:
        for path in weight_files(resolved.path):
            digest = listed[path.name]["sha256"] if path.name in listed else model_cache.sha256(path)
            whole.update(f"{path.name} {digest}\n".encode())
    except OSError as error:
        raise ModelError("model folder", resolved.path, f"readable files: {error.strerror or error}") from error
    return whole.hexdigest()


def _differs_from_files(model: Any, resolved: ResolvedModel) -> bool:
    """Whether weights stay in a GGUF file, or were rounded to FP8 at load."""
    if resolved.gguf is not None:
        return True
    has_fp8 = any(isinstance(weight, Fp8Weight) for _, weight in named_weights(model))
    return has_fp8 and fp8_scheme(resolved.path) is None


def weights_sample(model: Any) -> dict[str, tuple[float, ...]]:
    """A few values of a few weights, evenly spaced. Tied weights count once."""
    weights = sorted(named_weights(model), key=lambda named: named[0])
    sample = {}
    for which in _spread(len(weights), NUM_SAMPLED_WEIGHTS):
        name, weight = weights[which]
        if isinstance(weight, Panels):
            values = weight.values(_spread(weight.out_features * weight.in_features, NUM_SAMPLED_VALUES))
        elif isinstance(weight, Fp8Weight):
            values = _values_of_fp8(weight, _spread(weight.shape.numel(), NUM_SAMPLED_VALUES), model.dtype)
        else:
            places = torch.tensor(_spread(weight.numel(), NUM_SAMPLED_VALUES), device=weight.device)
            values = weight.detach()[torch.unravel_index(places, weight.shape)]
        sample[name] = tuple(values.double().tolist())
    return sample


def _values_of_fp8(weight: Fp8Weight, places: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers at these places of the flattened matrix, as a model in `dtype` multiplies with them."""
    found = []
    for row, column in (divmod(place, weight.shape[1]) for place in places):
        first = row - row % weight.block_rows
        block = weight.rows(first, min(first + weight.block_rows, weight.shape[0]))
        found.append(block.dequantised(dtype)[row - first, column])
    return torch.stack(found)


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` indices below `length`, evenly spaced from the first to the last."""
    if length <= most:
        return list(range(length))
    return [index * (length - 1) // (most - 1) for index in range(most)]


def _revision(resolved: ResolvedModel | None) -> str | None:
    """The commit of a hub model: the name of its snapshot folder in the hub cache."""
    if resolved is None or resolved.source != "hub" or not _COMMIT.fullmatch(resolved.path.name):
        return None
    return resolved.path.name


def _text(token: Any) -> str | None:
    return None if token is None else str(token)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: object) -> object:
    """Make 10000 and 10000.0 equal, and keys text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _canonical(entry) for key, entry in value.items()}
    return [_canonical(entry) for entry in value] if isinstance(value, (list, tuple)) else value
