"""The state of a loaded model before the engine rebinds its modules to kernels and its attention to the KV pool.

No weight is copied or changed. Until `restore`, the model's own `forward` and `generate` are not usable; `restore` puts
every class and setting back.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tide_core.errors import ConfigError, ModelError

_IN_USE: weakref.WeakSet[Any] = weakref.WeakSet()


class SavedModelState:
    """Saves module classes, training flags and the attention setting, and puts the model in eval mode. `restore` may be
    called more than once."""

    def __init__(self, model: Any) -> None:
        check_usable(model)
        self._model = model
        self._classes = [(module, type(module)) for module in model.modules()]
        self._training = [module for module in model.modules() if module.training]
        self._attention = model.config._attn_implementation
        _IN_USE.add(model)
        model.eval()

    def restore(self) -> None:
        if self._model is None:
            return
        for module, kind in self._classes:
            module.__class__ = kind
        for module in self._training:
            module.training = True
        self._model.config._attn_implementation = self._attention
        _IN_USE.discard(self._model)
        self._model = None


def check_usable(model: Any) -> None:
    """Refuse what is not a loaded model, is in use, or spans several devices."""
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError("model", name, "a name, or a causal language model loaded by transformers")
    if model in _IN_USE:
        expected = "a model that no other TIDE holds; close that one first (one TIDE takes other settings per call)"
        raise ConfigError("model", name, expected)
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ModelError(f"model {name}", f"weights on {', '.join(devices)}", "all weights in the memory of one device")
