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
        ArtefactError,
        ConfigError,
        EngineBusyError,
        EngineDeadError,
        EngineError,
        ModelError,
        RequestError,
        TideError,
    )
    from tide_core.outputs.exit_stats import ExitStats
    from tide_core.request import Audit, FinishReason, PromptToken, RequestOutput, SamplingParams, TokenOutput, Usage
    from tide_core.stats import EngineStats
    from tide_core.tide.calibrate import calibrate
    from tide_core.tide.config import TIDEConfig
    from tide_core.tide.runtime import TIDE

__version__ = "0.1.0"

__all__ = [
    "TIDE",
    "ArtefactError",
    "Audit",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "ExitStats",
    "FinishReason",
    "ModelError",
    "PromptToken",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TIDEConfig",
    "TideError",
    "TokenOutput",
    "Usage",
    "calibrate",
]

_HOMES = {
    "tide_core.config": ("EngineConfig",),
    "tide_core.engine.engine": ("Completion", "Engine"),
    "tide_core.outputs.exit_stats": ("ExitStats",),
    "tide_core.request": (
        "Audit",
        "FinishReason",
        "PromptToken",
        "RequestOutput",
        "SamplingParams",
        "TokenOutput",
        "Usage",
    ),
    "tide_core.stats": ("EngineStats",),
    "tide_core.tide.calibrate": ("calibrate",),
    "tide_core.tide.config": ("TIDEConfig",),
    "tide_core.tide.runtime": ("TIDE",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "tide_core.errors")
    return getattr(importlib.import_module(home), name)
