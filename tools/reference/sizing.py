"""Generate the sizing table: what well-known models need on GPUs of 80 and 141 GB, as `tide check-config --device`
computes it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from deploy.strict import yaml_file
from tide_core.config import GIB, EngineConfig
from tide_core.engine.plan import Outline, Plan, device_named, outline, plan
from tide_core.errors import ConfigError
from tide_core.models.weights import weight_bytes as counted
from tools.reference.markdown import table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- sizes: python tools/reference_docs.py -->", "<!-- end of the sizes -->"
GPUS = {"80 GB": "h100", "141 GB": "h200"}
CONTEXTS = (8192, 32768)
BYTES = 2
HOST_GIB = 16
"""Main memory of a worker besides the weights: libraries, CUDA, Ray and its shared memory."""
NONE = "does not fit"


LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN_7B = {
    **LLAMA_8B,
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
QWEN_32B = {
    **QWEN_7B,
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5 7B": QWEN_7B,
    "Mistral 7B v0.3": {
        **LLAMA_8B,
        "model_type": "mistral",
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen2.5 32B": QWEN_32B,
    "Llama 3.1 70B": {
        **LLAMA_8B,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
}
"""What their config.json says of sizes."""


@functools.cache
def outline_of(name: str) -> Outline:
    from transformers import AutoConfig

    return outline(AutoConfig.for_model(**MODELS[name], tie_word_embeddings=False))


def weight_bytes(name: str) -> int:
    return counted(outline_of(name).weights)


def kv_bytes_per_token(name: str) -> int:
    return sum(layout.num_elements for layout in outline_of(name).slots.layouts) * BYTES


def pod_gib(weights: int) -> int:
    """Memory of a worker: rounded up to 8."""
    return -(-(weights + HOST_GIB * GIB) // (8 * GIB)) * 8


def settings(**changes: Any) -> EngineConfig:
    """Those of deploy/config.gpu.yaml. The longest row is that of the table, so that less memory is no error."""
    config = yaml_file.read(ROOT / "deploy" / "config.gpu.yaml")
    engine = config["applications"][0]["args"]["engine"]
    return EngineConfig.from_mapping({**engine, "max_model_len": CONTEXTS[0], **changes})


def pool_of(name: str, gpu: str, *, swap: bool) -> Plan | None:
    """What would be chosen there; None for a model that does not fit."""
    try:
        return plan(settings(artefact_swap=swap), outline_of(name), device_named(gpu), "bfloat16")
    except ConfigError:
        return None


def pool_bytes(found: Plan) -> int:
    return int(found.config.kv_memory_gib * GIB)


def rows_of(name: str, found: Plan, context: int) -> int:
    return min(found.config.max_rows, pool_bytes(found) // (context * kv_bytes_per_token(name)))


def sizes() -> str:
    head = ["model", "weights", "KV per token", "worker's memory, at least"]
    for gpu in GPUS:
        head += [f"{gpu}: pool", *(f"rows of {context:,}" for context in CONTEXTS)]
    rows = []
    for name in MODELS:
        weights = weight_bytes(name)
        row = [name, in_gib(weights), f"{kv_bytes_per_token(name) / 1024:g} KiB", f"{pod_gib(weights)} GiB"]
        for device in GPUS.values():
            whole, kept = pool_of(name, device, swap=False), pool_of(name, device, swap=True)
            if whole is None:
                row += [NONE, *["–"] * len(CONTEXTS)]
                continue
            row.append(f"{in_gib(pool_bytes(kept)) if kept else NONE} ({in_gib(pool_bytes(whole))})")
            for context in CONTEXTS:
                row.append(f"{rows_of(name, kept, context) if kept else 0} ({rows_of(name, whole, context)})")
        rows.append(row)
    return table(head, rows)


def in_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
