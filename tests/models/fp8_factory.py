"""Tiny folders with random FP8 weights, and the same model widened by hand, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from tests.factories import VOCAB_SIZE, tiny_tokenizer

Weights = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,  # one and a half blocks
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "mlp_only_layers": [1]}
CONFIGS: dict[str, Callable[..., Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": strategy, **block, **weights},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8 block": (BLOCKS, "weight_scale_inv", "block"),
    "fp8 tensor": (PER_TENSOR, "weight_scale_inv", "tensor"),
    "fp8 tensor, older": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "tensor"),
    "compressed tensor": (compressed("tensor"), "weight_scale", "tensor"),
    "compressed channel": (compressed("channel"), "weight_scale", "channel"),
    "compressed channel, flat": (compressed("channel"), "weight_scale", "flat"),
    "compressed block": (compressed("block"), "weight_scale", "block"),
}
"""quantization_config, name of the scales, their shape."""


@dataclass(frozen=True)
class TinyFp8:
    path: Path
    model: PreTrainedModel
    """The same weights, in float32."""


def make_fp8(
    folder: Path,
    form: str = "fp8 block",
    family: str = "llama",
    *,
    plain: Sequence[str] = ("lm_head", "embed_tokens", "norm", "mlp.gate.weight", ".bias"),
    change: Callable[[Weights], object] = lambda weights: None,
    quantization: dict[str, Any] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> TinyFp8:
    """Weights whose name has one of `plain` stay in `dtype`. `change` may break what is stored; `quantization` is
    added to the quantization_config."""
    described, scale_name, shape = FORMATS[form]
    torch.manual_seed(7)
    more = EXPERTS if family == "qwen3_moe" else {}
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**SIZES, **more, **config}), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    stored, widened = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if any(each in name for each in plain):
            stored[name] = widened[name] = weight
            continue
        values, scales, numbers = _random(weight.shape[0], weight.shape[1], shape)
        stored[name], widened[name] = values, numbers
        base = name.rpartition(".")[0]
        stored[f"{base}.{scale_name}"] = scales
        if "static" in str(described):
            stored[f"{base}.input_scale"] = torch.tensor(0.5)
    in_float32 = {name: weight.float() for name, weight in widened.items()}
    save_file(in_float32, folder / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    change(stored)
    _save(folder, stored, shards)
    path = folder / "config.json"
    config_json = {**json.loads(path.read_text()), "quantization_config": {**described, **(quantization or {})}}
    path.write_text(json.dumps({**config_json, "dtype": str(dtype).removeprefix("torch.")}))
    return TinyFp8(folder, model)


def _random(rows: int, columns: int, shape: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values in E4M3, their scales, and the numbers that both are."""
    values = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    height, width = {"tensor": (rows, columns), "block": (128, 128)}.get(shape, (1, columns))
    scales = torch.rand(-(-rows // height), -(-columns // width)) * 1e-3 + 1e-4
    numbers = values.float()
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            numbers[row : row + height, column : column + width] *= scales[row // height, column // width]
    if shape == "tensor":
        scales = scales.reshape([])
    return values, scales[:, 0] if shape == "flat" else scales, numbers


def _save(folder: Path, stored: Weights, shards: int) -> None:
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(stored)}
    for file in set(where.values()):
        part = {name: weight for name, weight in stored.items() if where[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
