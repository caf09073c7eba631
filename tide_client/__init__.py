"""Clients of TIDE Serve over gRPC.

    from tide_client import TideClient

    with TideClient("127.0.0.1:9000") as client:
        answer = client.generate("The capital of France is", max_tokens=16)
        print(answer.text, [token.exit_layer for token in answer.tokens])

`AsyncTideClient` has the same methods as coroutines. Neither needs Ray, torch, or the server's code. The names are
imported on first use, so that the other commands of `tide` do not import gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_client.aio import AsyncStream, AsyncTideClient
    from tide_client.errors import BadValueError, BrokenStreamError, StatusError, TideClientError
    from tide_client.results import Answer, AuditReport, Delta, ExitStats, ExitSummary, ModelInfo, Token, Usage
    from tide_client.sync import Stream, TideClient
    from tide_client.tls import Tls
    from tide_client.tools import ToolCall

__all__ = [
    "Answer",
    "AsyncStream",
    "AsyncTideClient",
    "AuditReport",
    "BadValueError",
    "BrokenStreamError",
    "Delta",
    "ExitStats",
    "ExitSummary",
    "ModelInfo",
    "StatusError",
    "Stream",
    "TideClient",
    "TideClientError",
    "Tls",
    "Token",
    "ToolCall",
    "Usage",
]

_MODULES = {
    "tide_client.aio": ("AsyncStream", "AsyncTideClient"),
    "tide_client.errors": ("BadValueError", "BrokenStreamError", "StatusError", "TideClientError"),
    "tide_client.sync": ("Stream", "TideClient"),
    "tide_client.tls": ("Tls",),
    "tide_client.tools": ("ToolCall",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "tide_client.results")
    return getattr(importlib.import_module(module), name)
