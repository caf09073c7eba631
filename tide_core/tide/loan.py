"""A loaded model on loan: the engine rebinds its modules to kernels and its attention to the KV pool, in place.

No weight is copied or changed. While the loan lasts the model's own `forward` and `generate` are not usable; giving it
back restores every class and setting, so that both do again what they did.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tide_core.errors import ConfigError, ModelError

_LENT: weakref.WeakSet[Any] = weakref.WeakSet()


class Loan:
    """Holds how the model was when it was taken; `give_back` may be called again."""

    def __init__(self, model: Any) -> None:
        check_usable(model)
        self._model = model
        self._classes = [(module, type(module)) for module in model.modules()]
        self._training = [module for module in model.modules() if module.training]
        self._attention = model.config._attn_implementation
        _LENT.add(model)
        model.eval()

    def give_back(self) -> None:
        if self._model is None:
            return
        for module, kind in self._classes:
            module.__class__ = kind
        for module in self._training:
            module.training = True
        self._model.config._attn_implementation = self._attention
        _LENT.discard(self._model)
        self._model = None


def check_usable(model: Any) -> None:
    """Refuse what is no loaded model, is in use, or lies on several devices."""
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError("model", name, "a name, or a causal language model loaded by transformers")
    if model in _LENT:
        expected = "a model that no other TIDE holds; close that one first (one TIDE takes other settings per call)"
        raise ConfigError("model", name, expected)
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ModelError(f"model {name}", f"weights on {', '.join(devices)}", "all weights in the memory of one device")
