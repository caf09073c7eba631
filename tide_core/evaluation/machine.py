"""What a machine calls itself, for the conditions of a measurement. No torch until a GPU is asked."""

from __future__ import annotations

import platform
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """The GPU or the processor, with as many threads as torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} with {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor as the kernel names it, where it does."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), "unknown")
