"""How much memory a device has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tide_core.kv.sizing import DeviceMemory

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def device_memory(device: torch.device) -> DeviceMemory:
    """Measured now; what the loader has freed counts as free."""
    if device.type != "cuda":
        return DeviceMemory(device.type, free=available_memory())
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(device.type, total, free, torch.cuda.memory_reserved(device))


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes of main memory that this process could still use, by the machine and its container; None if unknown."""
    return min(_limits(meminfo, cgroup), default=None)


def _limits(meminfo: Path, cgroup: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        yield int(lines["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        yield max(0, int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
