"""The weights that a model keeps: parameters, and matrices that stay quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tide_core.kernels.panels import Panels


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor | Panels]]:
    """Each once, by its first name: a head that is the embedding does not count again."""
    yield from model.named_parameters()
    seen = set()
    for name, module in model.named_modules():
        panels = getattr(module, "panels", None)
        if isinstance(panels, Panels) and id(panels) not in seen:
            seen.add(id(panels))
            yield f"{name}.weight", panels


def weight_bytes(model: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights of a loaded model, or of one without data. With `dtype` as if it were loaded in that type;
    quantised matrices stay what they are."""
    return sum(
        weight.data.nbytes if isinstance(weight, Panels) else weight.numel() * (dtype or weight.dtype).itemsize
        for _, weight in named_weights(model)
    )
