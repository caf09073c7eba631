"""What `quantization_config` of a config.json says of FP8 weights; every other quantisation is refused by name.

How the library would run activations (`activation_scheme`, `input_activations`, scales of inputs and of the KV cache)
is not asked: they stay in the dtype of the model. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_core.errors import ModelError
from tide_core.models.folder import json_object

BLOCK = (128, 128)
"""Rows and columns that share a scale."""
IGNORED = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Last parts of the names of tensors that only say how activations would be rounded."""
SUPPORTED = (
    "FP8 in E4M3: quant_method fp8, or compressed-tensors with float-quantized weights of 8 bits; "
    "another model, or the folder it was made from, unquantised"
)
FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the scales of a checkpoint lie."""

    scale_names: tuple[str, ...]
    """Last part of the name of the scales of `X.weight`: the first that is there. A weight is its value times it."""
    strategies: frozenset[str]
    """Of tensor, channel (a scale for each row) and block (one for each `BLOCK`)."""


def fp8_scheme(folder: Path) -> Fp8Scheme | None:
    """None for a folder whose weights are not quantised."""
    found = json_object(folder / "config.json").get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError("quantization_config", found, SUPPORTED)
    method = found.get("quant_method")
    if method == "fp8":
        return _of_fp8(found)
    if method == "compressed-tensors":
        return _of_compressed_tensors(found)
    raise ModelError("quantization_config.quant_method", method, SUPPORTED)


def _of_fp8(found: Mapping[str, Any]) -> Fp8Scheme:
    kind = str(found.get("fmt", "e4m3")).lower().removeprefix("float8_").removesuffix("fn")
    if kind != "e4m3":
        raise ModelError("quantization_config.fmt", found["fmt"], "e4m3")
    block = found.get("weight_block_size")
    if block is not None:
        _check_block("quantization_config.weight_block_size", block)
    # Without a word of it, older writers mean a scale for each matrix, and transformers blocks: the scales tell.
    strategies = {"block"} if block is not None else {"tensor"}
    if "weight_block_size" not in found:
        strategies.add("block")
    return Fp8Scheme(("weight_scale_inv", "weight_scale"), frozenset(strategies))


def _of_compressed_tensors(found: Mapping[str, Any]) -> Fp8Scheme:
    where = "quantization_config"
    _check_format(f"{where}.format", found.get("format"))
    for name in ("sparsity_config", "transform_config"):
        value = found.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise ModelError(f"{where}.{name}", value, "none: FP8 weights and nothing else")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{where}.config_groups", groups, "groups with weights of 8 bits")
    strategies = {_strategy(f"{where}.config_groups.{name}", group) for name, group in groups.items()}
    return Fp8Scheme(("weight_scale",), frozenset(strategies))


def _strategy(where: str, group: Any) -> str:
    """Of one group; refuses what is not FP8."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelError(f"{where}.weights", weights, "weights of 8 bits, type float")
    if group.get("format") is not None:
        _check_format(f"{where}.format", group["format"])
    strategy = weights.get("strategy")
    for name, value, allowed in (
        ("num_bits", weights.get("num_bits"), (8,)),
        ("type", weights.get("type"), ("float",)),
        ("strategy", strategy, ("tensor", "channel", "block")),
        ("symmetric", weights.get("symmetric", True), (True,)),
        ("dynamic", weights.get("dynamic", False), (False,)),
    ):
        if value not in allowed:
            raise ModelError(f"{where}.weights.{name}", value, " or ".join(str(each) for each in allowed))
    if strategy == "block":
        _check_block(f"{where}.weights.block_structure", weights.get("block_structure"))
    return str(strategy)


def _check_format(where: str, value: object) -> None:
    if value not in FORMATS:
        raise ModelError(where, value, " or ".join(FORMATS))


def _check_block(where: str, value: object) -> None:
    """A list, or as older writers have it `128x128`."""
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, (list, tuple)) or [str(size) for size in sizes] != [str(size) for size in BLOCK]:
        raise ModelError(where, value, f"{list(BLOCK)}")
