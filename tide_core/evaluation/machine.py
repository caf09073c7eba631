"""Names of the processor and the GPU, for the conditions of a measurement. Imports torch only for a device."""

from __future__ import annotations

import platform
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of torch threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} with {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The name of the processor, from `lscpu`."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), "unknown")
