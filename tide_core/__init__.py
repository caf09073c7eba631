"""TIDE Serve: per-token early exit for stock Hugging Face causal language models.

The public names load on first use, so that importing settings or errors costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_core.config import EngineConfig
    from tide_core.engine.engine import Completion, Engine
    from tide_core.errors import (
        ConfigError,
        EngineBusyError,
        EngineDeadError,
        EngineError,
        ModelError,
        RequestError,
        TideError,
    )
    from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage
    from tide_core.stats import EngineStats

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TideError",
    "TokenOutput",
    "Usage",
]

_HOMES = {
    "tide_core.config": ("EngineConfig",),
    "tide_core.engine.engine": ("Completion", "Engine"),
    "tide_core.request": ("FinishReason", "RequestOutput", "SamplingParams", "TokenOutput", "Usage"),
    "tide_core.stats": ("EngineStats",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "tide_core.errors")
    return getattr(importlib.import_module(home), name)
