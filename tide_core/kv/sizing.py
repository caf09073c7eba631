"""How much memory the KV pool gets where `kv_memory_gib` is `auto`. The arithmetic is pure; `gpu_memory` and
`available_memory` measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tide_core.config import GIB, EngineConfig
from tide_core.errors import ConfigError

GRAPHS_AND_CONTEXT = int(1.5 * GIB)
"""CUDA context, library workspaces and captured graphs, which are there after the pool."""
LOGIT_BUFFERS = 3
"""Tensors of logits in float32 that live at once where a step is not a graph: logits, weights, sorted weights."""
STATE_BUFFERS = 8
CPU_BYTES = GIB
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU when the model is loaded and the pool is not."""

    total: int
    free: int
    own: int
    """What this process has allocated there: weights."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the memory of a step depends on."""

    hidden: int
    vocab: int
    itemsize: int


def reserve_bytes(config: EngineConfig, model: ModelSize) -> int:
    """Memory that steps need outside the pool."""
    logits = config.max_rows * (1 + config.max_pending) * model.vocab * 4 * LOGIT_BUFFERS
    # Of a prompt's chunk: states, and the products of a gated MLP, which is about four times as wide.
    states = config.max_batch_tokens * model.hidden * model.itemsize * (STATE_BUFFERS + 3 * 4)
    return GRAPHS_AND_CONTEXT + logits + states


def gpu_pool_bytes(memory: GpuMemory, share: float, reserve: int, pools: int) -> int:
    """Size of one of `pools` equal pools; 0 if nothing is left. The share counts this process alone, so that replicas
    with a share each can be on one GPU; what others have taken already is taken."""
    left = min(int(share * memory.total) - memory.own, memory.free)
    return max(0, left - reserve) // pools


def cpu_pool_bytes(available: int | None, share: float) -> int:
    """The usual size, unless that is more than a share of the memory that is available."""
    return CPU_BYTES if available is None else min(CPU_BYTES, int(share * available))


def pool_bytes(config: EngineConfig, device: torch.device, model: ModelSize) -> int:
    """Budget of one pool by the settings."""
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    share = config.gpu_memory_utilization
    if device.type != "cuda":
        return cpu_pool_bytes(available_memory(), share)
    return gpu_pool_bytes(gpu_memory(device), share, reserve_bytes(config, model), 1 + config.artefact_swap)


def check_one_row(config: EngineConfig, device: torch.device, budget: int, needed: int, max_model_len: int) -> None:
    """Refuse an `auto` pool that cannot hold one row at full length."""
    if config.kv_memory_bytes is not None or budget >= needed:
        return
    half = "; half of the pool's memory is kept for a change of the artefact (artefact_swap)" * config.artefact_swap
    where = f"{config.gpu_memory_utilization:g} of a GPU (gpu_memory_utilization) less weights and a reserve"
    where = where + half if device.type == "cuda" else "of the memory that is available"
    expected = (
        f"{gib(needed)} for one row of max_model_len ({max_model_len} tokens); available are {gib(budget)}: {where}. "
        "Lower max_model_len, or use a device with more memory"
    )
    raise ConfigError("kv_memory_gib", "auto", expected)


def described(budget: int, num_blocks: int, block_size: int, max_rows: int, max_model_len: int) -> str:
    """The pool in one line: its size, and how many rows of which context fit."""
    rows = min(max_rows, num_blocks // -(-max_model_len // block_size))
    each = min(max_model_len, num_blocks // max_rows * block_size)
    whole = f"{rows} rows of {max_model_len} tokens"
    shared = "" if rows == max_rows else f", or {max_rows} (max_rows) of {each}"
    return f"{gib(budget)}, {num_blocks} blocks of {block_size} tokens: {whole}{shared}"


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def gpu_memory(device: torch.device) -> GpuMemory:
    """Measured now; what the loader has freed counts as free."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes of main memory that this process could still use, by the machine and its container; None if unknown."""
    return min(_limits(meminfo, cgroup), default=None)


def _limits(meminfo: Path, cgroup: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        yield int(lines["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        yield max(0, int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
