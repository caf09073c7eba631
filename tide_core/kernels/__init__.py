"""The ops the engine runs, in two versions: plain Torch (`reference`) and native CPU code (`native`).

`select_kernels` hands out one of them as a `Kernels`; nothing else in the project asks which is in use.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from tide_core.config import KERNELS
from tide_core.errors import ConfigError
from tide_core.kernels import elsewhere, reference

__all__ = ["Kernels", "native_digest", "native_obstacle", "reference_kernels", "select_kernels", "set_num_threads"]

_NATIVE_MODULE = "tide_core.kernels._native"
_log = logging.getLogger("tide")

__path__ = elsewhere.folders(__name__, __path__)


class LinearOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class RmsNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class SiluMulOp(Protocol):
    def __call__(self, gate: Tensor, up: Tensor) -> Tensor: ...


class RotaryOp(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class WriteKvOp(Protocol):
    def __call__(self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None: ...


class PagedAttentionOp(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """One version of the ops. `tide_core.kernels.reference` says what each means."""

    name: str
    linear: LinearOp
    rms_norm: RmsNormOp
    silu_mul: SiluMulOp
    rotary: RotaryOp
    write_kv: WriteKvOp
    paged_attention: PagedAttentionOp


def select_kernels(choice: str, device: torch.device | str) -> Kernels:
    """The ops for `device`. "auto" takes native where it can and says in the log, once, what it took and why."""
    if choice not in KERNELS:
        raise ConfigError("kernels", choice, f"one of {', '.join(KERNELS)}")
    if choice == "reference":
        _log_once("kernels: reference, as configured")
        return reference_kernels()
    cpu = torch.device(device).type == "cpu"
    obstacle = native_obstacle(torch.device(device).type)
    if obstacle is None:
        native = importlib.import_module("tide_core.kernels.native")
        instruction_set = importlib.import_module(_NATIVE_MODULE).instruction_set()
        _log_once(f"kernels: native ({instruction_set}), {'as configured' if choice == 'native' else 'on the cpu'}")
        return _kernels("native", native)
    if choice == "native":
        raise ConfigError("kernels", "native", f"auto or reference here: {obstacle}")
    _log_once(f"kernels: reference, because {obstacle}", logging.WARNING if cpu else logging.INFO)
    return reference_kernels()


def reference_kernels() -> Kernels:
    """The plain Torch ops: the ones gradients flow through."""
    return _kernels("reference", reference)


@functools.cache
def native_digest() -> str:
    """Of the file of the native module, so that timings of another build are told apart; empty without one."""
    if _import_error() is not None:
        return ""
    path = importlib.import_module(_NATIVE_MODULE).__file__ or ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def set_num_threads(count: int) -> None:
    """Threads that share one native call, the caller included; does nothing where there is no native module."""
    if _import_error() is None:
        importlib.import_module(_NATIVE_MODULE).set_num_threads(count)


def _kernels(name: str, ops: ModuleType) -> Kernels:
    return Kernels(name, ops.linear, ops.rms_norm, ops.silu_mul, ops.rotary, ops.write_kv, ops.paged_attention)


def native_obstacle(device_type: str) -> str | None:
    """Why native cannot run, or None."""
    if device_type != "cpu":
        return f"the native kernels run on the cpu, not on {device_type}"
    error = _import_error()
    return None if error is None else f"the native module cannot be imported ({error})"


@functools.cache
def _import_error() -> str | None:
    try:
        importlib.import_module(_NATIVE_MODULE)
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _log_once(message: str, level: int = logging.INFO) -> None:
    _log.log(level, message)
