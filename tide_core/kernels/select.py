"""Which version of the ops runs on a device: CUDA, native CPU code or plain Torch, chosen once and logged."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from pathlib import Path
from types import ModuleType

import torch

from tide_core.config import KERNELS
from tide_core.errors import ConfigError
from tide_core.kernels.ops import CudaKernels, Kernels
from tide_core.kernels.reference import ops as reference

_NATIVE_MODULE = "tide_core.kernels._native"
_CUDA_MODULE = "tide_core.kernels._cuda"
_log = logging.getLogger("tide")


def select_kernels(choice: str, device: torch.device | str) -> Kernels:
    """The ops for `device`. "auto" prefers native ones; the choice and its reason are logged once."""
    if choice not in KERNELS:
        raise ConfigError("kernels", choice, f"one of {', '.join(KERNELS)}")
    if choice == "reference":
        _log_once("kernels: reference, as configured")
        return reference_kernels()
    kind = torch.device(device).type
    cpu = kind == "cpu"
    reason = cuda_unsupported_reason(device) if kind == "cuda" else native_unsupported_reason(kind)
    if reason is None and not cpu:
        _log_once(f"kernels: cuda, {'as configured' if choice == 'native' else 'on the GPU'}")
        _warn_if_older(torch.device(device))
        return cuda_kernels()
    if reason is None:
        native = importlib.import_module("tide_core.kernels.cpu.ops")
        instruction_set = importlib.import_module(_NATIVE_MODULE).instruction_set()
        _log_once(f"kernels: native ({instruction_set}), {'as configured' if choice == 'native' else 'on the cpu'}")
        return _kernels("native", native)
    if choice == "native":
        raise ConfigError("kernels", "native", f"auto or reference here: {reason}")
    _log_once(f"kernels: reference, because {reason}", logging.WARNING if cpu else logging.INFO)
    return reference_kernels()


def cuda_kernels() -> CudaKernels:
    """The CUDA ops, or Torch's for steps with more rows than they support."""
    cuda = importlib.import_module("tide_core.kernels.cuda.ops")
    cycle = importlib.import_module("tide_core.kernels.cuda.cycle")
    branches = importlib.import_module("tide_core.kernels.cuda.branches")
    adjust = importlib.import_module("tide_core.kernels.cuda.adjust")
    draws = importlib.import_module("tide_core.kernels.cuda.draw")
    return CudaKernels(
        name="cuda",
        linear=cuda.linear_of_any,
        rms_norm=cuda.rms_norm,
        silu_mul=cuda.silu_mul,
        rotary=cuda.rotary,
        write_kv=cuda.write_kv,
        paged_attention=cuda.paged_attention,
        quantised_linear=None,
        fused_linear=cuda.fused_linear_of_any,
        rotary_write=cuda.rotary_write,
        attend=cuda.paged_attention,
        attention_workspace=cuda.attention_workspace,
        top2_logsumexp=cuda.top2_logsumexp,
        router=cuda.router,
        score_scratch=cuda.Scratch.sized,
        exit_input=cuda.exit_input,
        norm_into=cuda.rms_norm,
        embed=cuda.embed,
        scatter_rows=cuda.scatter_rows,
        plan_cycle=cycle.plan_cycle,
        pending_tokens=cycle.pending_tokens,
        accept_drafts=cycle.accept_drafts,
        top_logprobs=cycle.top_logprobs,
        nth_best=branches.nth_best,
        slot_copier=branches.slot_copier,
        draw=draws.draw,
        draw_numbers=draws.draw_numbers,
        adjust_logits=adjust.adjust_logits,
        count_outputs=adjust.count_outputs,
        verify_drawn=draws.verify_drawn,
        supports=cuda.supports,
        attend_joined=cuda.attend_joined,
        supports_joined=cuda.supports_joined,
    )


def reference_kernels() -> Kernels:
    """The plain Torch ops: the ones gradients flow through."""
    return _kernels("reference", reference)


@functools.cache
def native_digest() -> str:
    """A hash of the native modules' files, which separates timings of different builds; empty without any."""
    built = [name for name in (_NATIVE_MODULE, _CUDA_MODULE) if _import_error(name) is None]
    raw = b"".join(Path(importlib.import_module(name).__file__ or "").read_bytes() for name in built)
    return hashlib.sha256(raw).hexdigest()[:16] if built else ""


def set_num_threads(count: int) -> None:
    """Set the threads that share one native call, the caller included; does nothing without a native module."""
    if _import_error() is None:
        importlib.import_module(_NATIVE_MODULE).set_num_threads(count)


def _kernels(name: str, ops: ModuleType) -> Kernels:
    of_all = (ops.linear, ops.rms_norm, ops.silu_mul, ops.rotary, ops.write_kv, ops.paged_attention)
    return Kernels(name, *of_all, quantised_linear=ops.quantised_linear)


def native_unsupported_reason(device_type: str) -> str | None:
    """Why native cannot run, or None."""
    if device_type != "cpu":
        return f"the native kernels run on the cpu, not on {device_type}"
    error = _import_error()
    return None if error is None else f"the native module cannot be imported ({error})"


def cuda_unsupported_reason(device: torch.device | str = "cuda") -> str | None:
    """Why the CUDA ops cannot run on `device`, or None."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the CUDA kernels run on a GPU, not on {device.type}"
    error = _import_error(_CUDA_MODULE)
    if error is not None:
        return f"the CUDA module cannot be imported ({error})"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    try:
        loaded_architecture(device)
    except RuntimeError as error:
        built = importlib.import_module(_CUDA_MODULE).architectures()
        major, minor = torch.cuda.get_device_capability(device)
        return f"the CUDA module was built for {built}, not for compute capability {major}.{minor} ({error})"
    return None


def loaded_architecture(device: torch.device) -> int:
    """Ten times the compute capability that the code which runs on `device` was compiled for: kernels are chosen by it.

    Raises RuntimeError where the build has no such code."""
    with torch.cuda.device(device):
        architecture: int = importlib.import_module(_CUDA_MODULE).loaded_architecture()
    return architecture


def _warn_if_older(device: torch.device) -> None:
    """A build for an older generation is right and slow: it has none of the kernels of the newer one."""
    built, (major, minor) = loaded_architecture(device), torch.cuda.get_device_capability(device)
    if built // 10 < major:
        _log_once(
            f"kernels: a GPU of compute capability {major}.{minor} runs kernels for {built // 10}.{built % 10}; "
            f"a build with TIDE_CUDA_ARCHS={major}{minor} is faster",
            logging.WARNING,
        )


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
