"""The ops the engine runs, in three versions: plain Torch (`reference`), native CPU code (`native`), and CUDA (`cuda`).

`select_kernels` hands out one of them as a `Kernels`. What only a GPU gains from, such as a linear with what follows
it, is in `CudaKernels` alone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from tide_core.config import KERNELS
from tide_core.errors import ConfigError
from tide_core.kernels import elsewhere, reference
from tide_core.kernels.branching import CopySlots
from tide_core.kernels.draw_plan import DrawnCycle
from tide_core.kernels.reference import Norm, Peaks, RouterWeights

__all__ = [
    "CudaKernels",
    "Kernels",
    "cuda_obstacle",
    "native_digest",
    "native_obstacle",
    "reference_kernels",
    "select_kernels",
    "set_num_threads",
]

_NATIVE_MODULE = "tide_core.kernels._native"
_CUDA_MODULE = "tide_core.kernels._cuda"
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


class FusedLinearOp(Protocol):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gated: bool = False,
        norm: Norm | None = None,
    ) -> Tensor: ...


class RotaryWriteOp(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor: ...


class AttendOp(Protocol):
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
        *,
        max_queries: int,
        max_context: int,
        workspace: Tensor,
        fresh: bool = False,
    ) -> Tensor: ...


class ExitInputOp(Protocol):
    def __call__(
        self,
        states: Tensor,
        state_norm: Tensor,
        deep_states: Tensor,
        deep_slots: Tensor,
        deep_norm: Tensor,
        distances: Tensor,
        table: Tensor,
        eps: float,
    ) -> Tensor: ...


class AttendJoinedOp(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
        *,
        max_queries: int,
        max_context: int,
        workspace: Tensor,
    ) -> Tensor: ...


@dataclass(frozen=True)
class CudaKernels(Kernels):
    """All indices are on the device, and nothing waits for it."""

    fused_linear: FusedLinearOp
    rotary_write: RotaryWriteOp
    attend: AttendOp
    """`paged_attention`, told at most how many queries and positions a row has."""
    attention_workspace: Callable[..., Tensor]
    """For `attend` and `attend_joined`: the most tokens, query heads, elements of a head and positions; where; and as
    `held` one that is handed back where it is large enough."""
    peak: Callable[..., Peaks]
    """Of logits, with a scratch and by name where to write."""
    router: Callable[..., tuple[Tensor, Tensor | None]]
    """Of features, peaks and weights, by name with a scratch and where to write."""
    judge: Callable[[Tensor, Tensor, RouterWeights, Any], tuple[Tensor, Tensor]]
    judge_scratch: Callable[..., Any]
    """For `peak` and `judge`: where, rows, and by name `vocabulary` and `bottleneck`."""
    exit_input: ExitInputOp
    norm_into: Callable[..., Tensor]
    """`rms_norm`, by name where to write."""
    embed: Callable[..., Tensor]
    """Of ids and rows, by name where to write."""
    scatter_rows: Callable[[Tensor, Tensor, Tensor], None]
    plan_cycle: Callable[..., None]
    pending_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    carry_on: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor], None]
    """`tide_core.kernels.cycle_plan` says what these make."""
    nth_best: Callable[..., Tensor]
    slot_copier: Callable[[Sequence[Tensor], int], CopySlots]
    """`tide_core.kernels.branching` says what these do."""
    draw: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    verify_drawn: Callable[[Tensor, DrawnCycle], tuple[Tensor, Tensor]]
    """`tide_core.kernels.draw_plan` says what both mean."""
    takes: Callable[[Tensor, Tensor], bool]
    """Whether `attend` knows keys and values as these pools hold them."""
    attend_joined: AttendJoinedOp
    """`rotary_write`, then `attend`, for rows of few queries."""
    takes_joined: Callable[[Tensor, Tensor], bool]
    """Whether `attend_joined` does; what it does not take stays with the two ops."""


def select_kernels(choice: str, device: torch.device | str) -> Kernels:
    """The ops for `device`. "auto" takes native where it can and says in the log, once, what it took and why."""
    if choice not in KERNELS:
        raise ConfigError("kernels", choice, f"one of {', '.join(KERNELS)}")
    if choice == "reference":
        _log_once("kernels: reference, as configured")
        return reference_kernels()
    kind = torch.device(device).type
    cpu = kind == "cpu"
    obstacle = cuda_obstacle(device) if kind == "cuda" else native_obstacle(kind)
    if obstacle is None and not cpu:
        _log_once(f"kernels: cuda, {'as configured' if choice == 'native' else 'on the GPU'}")
        return cuda_kernels()
    if obstacle is None:
        native = importlib.import_module("tide_core.kernels.native")
        instruction_set = importlib.import_module(_NATIVE_MODULE).instruction_set()
        _log_once(f"kernels: native ({instruction_set}), {'as configured' if choice == 'native' else 'on the cpu'}")
        return _kernels("native", native)
    if choice == "native":
        raise ConfigError("kernels", "native", f"auto or reference here: {obstacle}")
    _log_once(f"kernels: reference, because {obstacle}", logging.WARNING if cpu else logging.INFO)
    return reference_kernels()


def cuda_kernels() -> CudaKernels:
    """The CUDA ops, or Torch's where a step has more rows than they are made for."""
    cuda = importlib.import_module("tide_core.kernels.cuda")
    cycle = importlib.import_module("tide_core.kernels.cuda_cycle")
    branches = importlib.import_module("tide_core.kernels.cuda_branches")
    draws = importlib.import_module("tide_core.kernels.cuda_draw")
    return CudaKernels(
        name="cuda",
        linear=cuda.linear_of_any,
        rms_norm=cuda.rms_norm,
        silu_mul=cuda.silu_mul,
        rotary=cuda.rotary,
        write_kv=cuda.write_kv,
        paged_attention=cuda.paged_attention,
        fused_linear=cuda.fused_linear_of_any,
        rotary_write=cuda.rotary_write,
        attend=cuda.paged_attention,
        attention_workspace=cuda.attention_workspace,
        peak=cuda.peak,
        router=cuda.router,
        judge=cuda.judge,
        judge_scratch=cuda.Scratch.sized,
        exit_input=cuda.exit_input,
        norm_into=cuda.rms_norm,
        embed=cuda.embed,
        scatter_rows=cuda.scatter_rows,
        plan_cycle=cycle.plan_cycle,
        pending_tokens=cycle.pending_tokens,
        carry_on=cycle.carry_on,
        nth_best=branches.nth_best,
        slot_copier=branches.slot_copier,
        draw=draws.draw,
        verify_drawn=draws.verify_drawn,
        takes=cuda.takes,
        attend_joined=cuda.attend_joined,
        takes_joined=cuda.takes_joined,
    )


def reference_kernels() -> Kernels:
    """The plain Torch ops: the ones gradients flow through."""
    return _kernels("reference", reference)


@functools.cache
def native_digest() -> str:
    """Of the files of the native modules, so that timings of another build are told apart; empty without any."""
    built = [name for name in (_NATIVE_MODULE, _CUDA_MODULE) if _import_error(name) is None]
    raw = b"".join(Path(importlib.import_module(name).__file__ or "").read_bytes() for name in built)
    return hashlib.sha256(raw).hexdigest()[:16] if built else ""


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


def cuda_obstacle(device: torch.device | str = "cuda") -> str | None:
    """Why the CUDA ops cannot run on `device`, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the CUDA kernels run on a GPU, not on {device.type}"
    error = _import_error(_CUDA_MODULE)
    if error is not None:
        return f"the CUDA module cannot be imported ({error})"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    built = [int(arch) for arch in importlib.import_module(_CUDA_MODULE).architectures().split(",")]
    major, minor = torch.cuda.get_device_capability(device)
    # Code runs on later devices of its own generation, PTX (there is that of the newest) on all later ones.
    if any(arch // 10 == major and arch % 10 <= minor for arch in built) or built[-1] <= 10 * major + minor:
        return None
    return f"the CUDA module was built for {built}, not for compute capability {major}.{minor}"


@functools.cache
def _import_error(module: str = _NATIVE_MODULE) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _log_once(message: str, level: int = logging.INFO) -> None:
    _log.log(level, message)
