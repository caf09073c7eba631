"""The weights that a model keeps: parameters, and matrices that stay quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tide_core.kernels.fp8 import Fp8Weight
from tide_core.kernels.panels import Panels


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor | Panels | Fp8Weight]]:
    """Each once, by its first name: a head that is the embedding does not count again."""
    yield from model.named_parameters()
    seen = set()
    for name, module in model.named_modules():
        for attribute in ("panels", "fp8"):
            matrix = getattr(module, attribute, None)
            if isinstance(matrix, (Panels, Fp8Weight)) and id(matrix) not in seen:
                seen.add(id(matrix))
                yield f"{name}.weight", matrix


def num_weights(model: Any) -> int:
    """How many numbers those are."""
    return sum(
        weight.out_features * weight.in_features if isinstance(weight, Panels) else weight.shape.numel()
        for _, weight in named_weights(model)
    )


def weight_bytes(model: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights of a loaded model, or of one without data. With `dtype` as if it were loaded in that type;
    quantised matrices stay what they are."""
    return sum(_bytes(weight, dtype) for _, weight in named_weights(model))


def _bytes(weight: torch.Tensor | Panels | Fp8Weight, dtype: torch.dtype | None) -> int:
    if isinstance(weight, Panels):
        return weight.data.nbytes
    if isinstance(weight, Fp8Weight):
        return weight.nbytes
    return weight.numel() * (dtype or weight.dtype).itemsize
