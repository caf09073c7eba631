"""Which linears of a model may be in FP8: those of its decoder layers. All others, and experts, are not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import nn

from tide_core.errors import ConfigError, ModelError
from tide_core.kernels.fp8 import Fp8Weight, quantised_by_row
from tide_core.models.families import find_family
from tide_core.models.quantised import Fp8Linear

ROUTERS = ("gate", "router")
"""Last part of the name of a linear that chooses among experts."""


def layer_linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The plain linears of the decoder layers, by name."""
    family = find_family(model)
    backbone = reduce(getattr, family.backbone.split("."), model)
    layers = getattr(backbone, family.layers)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for name, module in layers.named_modules(prefix=prefix):
        if type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            yield name, module


def quantise_layers(model: Any, place: torch.device) -> int:
    """Round those linears to FP8, each output row with its own scale, one after another on `place`; returns how many.
    A matrix is freed before the next one is rounded. Also of a model without data, for its sizes."""
    names = [name for name, _ in layer_linears(model)]  # the linears themselves would not be freed
    for name in names:
        linear = model.get_submodule(name)
        where = linear.weight.device if linear.weight.is_meta else place
        weight = quantised_by_row(linear.weight.detach().to(where))
        check_numbers(f"{name}.weight", weight)
        bias = None if linear.bias is None else linear.bias.detach().to(where)
        model.set_submodule(name, Fp8Linear(weight, bias))
    if not names:
        refuse_rounding(model)
    return len(names)


def refuse_rounding(model: Any) -> NoReturn:
    expected = f"auto or none with {type(model).__name__}, whose layers have no linears that are known as such"
    raise ConfigError("quantization", "fp8", expected)


def check_numbers(name: str, weight: Fp8Weight) -> None:
    """Refuse NaN, in values or scales, and infinite scales. E4M3 has no infinity."""
    if weight.values.is_meta:
        return
    not_a_number = (weight.values.view(torch.uint8) & 0x7F) == 0x7F
    if bool(not_a_number.any()) or not bool(torch.isfinite(weight.scales).all()):
        raise ModelError(name, "NaN or infinity", "finite weights")
