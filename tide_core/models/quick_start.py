"""A quick start for a process of our own that runs a model and neither compiles it nor distributes it by transformers.

While they are imported and while they make a model, transformers and torch mark functions for torch's compiler and look
for distributed tensors; for that torch imports its compiler, sympy and more. Here those marks do nothing. Whatever else
is asked of the compiler imports it as ever.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that change nothing where nothing is compiled."""
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """While the libraries are imported and the model is loaded. One thread at a time: it changes modules of all."""
    with _one_at_a_time, _no_collections():
        import torch

        with _no_compiler(torch), _no_distribution(torch):
            yield


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collections of garbage find none among modules, and take a fifth of the time; what was imported is never looked
    at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _Marks(ModuleType):
    """The compiler's package as far as its marks go; its modules can be imported from it one by one."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__(COMPILER)
        self.__path__ = [str(Path(str(torch.__file__)).with_name("_dynamo"))]
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        if name in MARKS:
            return _unmarked
        if name.startswith("__"):
            raise AttributeError(name)
        self.make_way()
        return getattr(importlib.import_module(COMPILER), name)

    def make_way(self) -> None:
        """From now on the real one is imported when it is asked for."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        if vars(self._torch).get("_dynamo") is self:
            del self._torch._dynamo


def _unmarked(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The function itself; for a mark with options a decorator that gives it."""
    return _unmarked if function is None else function


@contextlib.contextmanager
def _no_compiler(torch: ModuleType) -> Iterator[None]:
    if COMPILER in sys.modules:
        yield
        return
    marks = _Marks(torch)
    sys.modules[COMPILER] = torch._dynamo = marks  # type: ignore[attr-defined]
    try:
        yield
    finally:
        marks.make_way()


@contextlib.contextmanager
def _no_distribution(torch: ModuleType) -> Iterator[None]:
    distributed = torch.distributed
    known = distributed.is_available
    distributed.is_available = lambda: False
    try:
        yield
    finally:
        distributed.is_available = known
