"""What settings come to on a device that is not here: from config.json, and of weights in FP8 from the headers of their
files. The model is made without memory for weights and probed as the engine does it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tide_core.config import AUTO, GIB, EngineConfig, ResolvedConfig
from tide_core.engine.pool import SlotLayout, check_model_len
from tide_core.errors import ConfigError, ModelError, one_line
from tide_core.execution.graphs.branches import SPARE_BLOCKS
from tide_core.exits.artefact.heads import HeadSpec
from tide_core.kv.sizing import DeviceMemory, ModelSize, described, gib, reserve_bytes, resolve_config
from tide_core.models.adapter import ModelAdapter
from tide_core.models.checkpoint import chosen_dtype
from tide_core.models.fp8.layers import quantise_layers
from tide_core.models.fp8.scheme import fp8_scheme
from tide_core.models.gguf.quantised import outline_quantised
from tide_core.models.loader import TORCH_DTYPES, keeps_fp8, widening_reason
from tide_core.models.streamed import outline_fp8
from tide_core.models.weights import weight_bytes
from tide_core.models.without_data import unquantised

GPUS = {"t4": 14, "l4": 22, "a10": 22, "l40s": 44, "a100-40gb": 39, "a100": 79, "h100": 79, "h200": 139}
"""GiB that the driver reports, rounded down."""
_SIZED = re.compile(r"(cpu|cuda):(\d+(?:\.\d+)?)GiB")


@dataclass(frozen=True, slots=True)
class Outline:
    """What the memory that a model takes depends on."""

    weights: Any
    """The model without data, for the bytes of its weights."""
    slots: SlotLayout
    hidden: int
    vocab: int
    max_positions: int
    has_exits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings in force on a device, and what they were computed from."""

    given: EngineConfig
    config: ResolvedConfig
    size: ModelSize

    def __str__(self) -> str:
        return described(self.given, self.config, self.size, self.config.device)


def device_named(text: str) -> DeviceMemory:
    """`cpu`, the name of a GPU, or a size as in `cuda:80GiB` or `cpu:16GiB`."""
    if text == "cpu":
        return DeviceMemory("cpu")
    if text.lower() in GPUS:
        return DeviceMemory("cuda", GPUS[text.lower()] * GIB)
    if (found := _SIZED.fullmatch(text)) is None or not 0 < float(found[2]) <= 4096:
        raise ConfigError("device", text, f"cpu, {', '.join(GPUS)}, or a size as in cuda:80GiB or cpu:16GiB")
    return DeviceMemory(found[1], int(float(found[2]) * GIB))


def outline_of_folder(folder: Path, heads: Sequence[HeadSpec] = ()) -> Outline:
    from transformers import AutoConfig

    scheme = fp8_scheme(folder)  # which refuses other quantisations
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types, as when a model is loaded
        raise ModelError(f"config.json in {folder}", one_line(error), "one that transformers can read") from error
    if scheme is not None:
        unquantised(config)
    return outline(config, heads)


def outline(model_config: Any, heads: Sequence[HeadSpec] = ()) -> Outline:
    """Of a model by transformers' configuration of it, with the heads of an artefact."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            # The layers of some families run in this type alone where there is no data.
            # The adapter changes the configuration, which the caller may use again.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=torch.bfloat16)
        adapter = ModelAdapter(model)
        slots = SlotLayout.of(adapter, heads)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        expected = "a model whose layers can be run without their weights; the engine says it when it starts"
        raise ModelError(f"model of type {model_config.model_type}", one_line(error), expected) from error
    return Outline(
        weights=model,
        slots=slots,
        hidden=int(adapter.config.hidden_size),
        vocab=adapter.vocab_size,
        max_positions=adapter.max_positions,
        has_exits=bool(heads),
    )


def plan_for_folder(
    config: EngineConfig, folder: Path, device: DeviceMemory, heads: Sequence[HeadSpec] = (), gguf: Path | None = None
) -> Plan:
    """`gguf` is the file that the folder was made from, whose matrices the engine may keep as they are."""
    model = outline_of_folder(folder, heads)
    if gguf is not None and widening_reason(config, device.type) is None:
        model = replace(model, weights=outline_quantised(folder, gguf))
    dtype = chosen_dtype(config.dtype, device.type, folder)
    scheme = fp8_scheme(folder)
    kept = keeps_fp8(config.quantization, device.type, dtype)
    if scheme is not None and kept:
        model = replace(model, weights=outline_fp8(folder, folder.name, scheme, dtype=TORCH_DTYPES[dtype]))
    elif scheme is None and config.quantization == "fp8":
        quantise_layers(model.weights, torch.device("meta"))
    return plan(config, model, device, dtype)


def plan(config: EngineConfig, model: Outline, device: DeviceMemory, dtype: str) -> Plan:
    """Raises ConfigError for what the engine would refuse there, or not have the memory for."""
    kind = TORCH_DTYPES[dtype]
    weights = weight_bytes(model.weights, kind)
    free = device.total - weights if device.total else None
    if free is not None and free <= 0:
        raise ConfigError("device", gib(device.total), f"more memory than the weights take, {gib(weights)} in {dtype}")
    loaded = DeviceMemory(device.type, device.total, free, weights)
    spare_blocks = SPARE_BLOCKS if device.type == "cuda" and model.has_exits else 0
    size = model.slots.model_size(
        config,
        kind,
        hidden=model.hidden,
        vocab=model.vocab,
        max_model_len=check_model_len(config, model.max_positions),
        spare_blocks=spare_blocks,
        weight_bytes=weights,
    )
    in_force = resolve_config(config, loaded, size, dtype=dtype)
    if config.kv_memory_gib != AUTO and free is not None:
        most = free - (reserve_bytes(in_force, size) if device.type == "cuda" else 0)
        if in_force.kv_memory_gib * GIB > most:
            raise ConfigError("kv_memory_gib", config.kv_memory_gib, f"at most {gib(max(0, most))} there, or auto")
    return Plan(replace(config, device=device.type), in_force, size)
