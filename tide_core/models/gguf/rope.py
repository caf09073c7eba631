"""Rotary positions of a GGUF as the rope parameters of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tide_core.errors import ModelError
from tide_core.models.gguf.file import GGUFFile

KEYS = {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
# The scaling rule of Llama 3.1 to 3.3; the file holds only its result, one factor per frequency.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def read(file: GGUFFile, head_dim: int, *, theta: float = 10000.0) -> dict[str, Any]:
    """`theta`: that of the architecture, if the file has none."""
    name = file.text("general.architecture")
    theta = file.number(f"{name}.rope.freq_base", theta)
    for tensor in (LONG_FACTORS, SHORT_FACTORS):
        if tensor in file.tensors:
            raise ModelError(f"{file.path}: tensor {tensor}", "long and short factors", "these for phi3 alone")
    has_linear = f"{name}.rope.scale_linear" in file.metadata
    kind = file.text(f"{name}.rope.scaling.type", "linear" if has_linear else "none")
    if FACTORS in file.tensors:
        if kind != "none":
            raise ModelError(f"{file.path}: {FACTORS}", f"together with rope scaling {kind}", "one kind of scaling")
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: {name}.rope.scaling.type", kind, "none, linear or yarn")
    if f"{name}.rope.scaling.attn_factor" in file.metadata:
        attention = file.number(f"{name}.rope.scaling.attn_factor")
        raise ModelError(f"{file.path}: {name}.rope.scaling.attn_factor", attention, "this setting for phi3 alone")
    has_factor = f"{name}.rope.scaling.factor" in file.metadata
    factor = file.number(f"{name}.rope.scaling.factor" if has_factor else f"{name}.rope.scale_linear")
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = file.integer(f"{name}.rope.scaling.original_context_length", low=1)
        parameters["original_max_position_embeddings"] = context
    return parameters


def read_phi3(file: GGUFFile, head_dim: int, context: int) -> dict[str, Any]:
    """Of Phi-3 and Phi-4: a part of each head is rotated, and long contexts have factors for each frequency."""
    rotated = file.integer("phi3.rope.dimension_count", head_dim, low=2, high=head_dim)
    original = file.integer("phi3.rope.scaling.original_context_length", context, low=1)
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.number("phi3.rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_dim,
    }
    if FACTORS in file.tensors or file.text("phi3.rope.scaling.type", "none") not in ("none", "longrope"):
        raise ModelError(f"{file.path}: rope scaling", file.metadata.get("phi3.rope.scaling.type"), "none or longrope")
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        factors = {"long_factor": _factors(file, LONG_FACTORS, rotated)}
        parameters |= {"rope_type": "longrope", **factors, "short_factor": _factors(file, SHORT_FACTORS, rotated)}
        parameters["original_max_position_embeddings"] = original
        _check_attention_factor(file, context / original, original)
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def _factors(file: GGUFFile, tensor: str, rotated: int) -> list[float]:
    if tensor not in file.tensors:
        raise ModelError(f"{file.path}: tensor {tensor}", None, "long and short factors")
    if file.tensors[tensor].shape != (rotated // 2,):
        raise ModelError(f"{file.path}: tensor {tensor}", file.tensors[tensor].shape, f"shape {(rotated // 2,)}")
    return [float(str(value)) for value in file.read(tensor)]


def _check_attention_factor(file: GGUFFile, scale: float, original: int) -> None:
    """The library computes the factor by the rule of the paper; a file with another one is refused."""
    expected = math.sqrt(1.0 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
    found = file.number("phi3.rope.scaling.attn_factor", expected)
    if not math.isclose(found, expected, rel_tol=1e-3):
        raise ModelError(f"{file.path}: phi3.rope.scaling.attn_factor", found, f"{expected:.4f}")


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 rule that gives the factors in the file; factors of another rule are refused."""
    shape = file.tensors[FACTORS].shape
    if shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: tensor {FACTORS}", shape, f"shape {(head_dim // 2,)}")
    found = file.read(FACTORS).astype(np.float64)
    factor = float(str(found.max().astype(np.float32)))
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_CONTEXT / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    if factor < 1 or not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError(f"{file.path}: tensor {FACTORS}", found.tolist(), "the frequency factors of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
