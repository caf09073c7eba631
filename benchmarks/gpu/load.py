"""Part `load`: how much host memory a process takes while it loads a checkpoint of the large shape in shards.

A process of its own loads it, because the memory of this one has been more. Its peak is that of everything that lies in
memory for it: files that are mapped, PyTorch and the CUDA context too, which are stated beside it.

    python -m benchmarks.gpu.load FOLDER --device cpu    # a folder that is there, alone
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import ROOT
from benchmarks.common.report import Measures
from benchmarks.common.shapes import SMALL, byte_tokenizer
from benchmarks.gpu.parts import Session
from tide_core.models.loader import load_model
from tide_core.models.resolver import resolve

SHARD = "5GB"
"""As checkpoints of this size are published."""
LIMIT_S = 300.0
GB = 1e9


def load(session: Session) -> Measures:
    """Peak of the host's memory over the size of the largest shard."""
    found, subject = Measures(), session.subject
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder, max_shard_size="100KB" if subject.shape is SMALL else SHARD)
        byte_tokenizer().save_pretrained(folder)
        largest = max(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        command = [sys.executable, "-m", "benchmarks.gpu.load", folder, "--device", subject.device.type]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    found.figures |= {"largest_shard_gb": largest / GB, **figures}
    shown = (
        f"{figures['peak_gb']:.2f} GB, of which {figures['before_gb']:.2f} before, shards up to {largest / GB:.2f} GB"
    )
    found.add("load_host", figures["peak_gb"] * GB / largest, f"{shown}; {figures['seconds']:.1f} s")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load a model and print the host memory that it took, as JSON.")
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    torch.zeros(1, device=options.device)
    before, began = peak_gb(), time.perf_counter()
    model = load_model(resolve(options.folder), dtype="auto", device=options.device)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"before_gb": before, "peak_gb": peak_gb(), "seconds": time.perf_counter() - began}))
    return 0


def peak_gb() -> float:
    """Most memory that this program has held so far. `getrusage` would count that of the process it came from, too."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / GB


if __name__ == "__main__":
    sys.exit(main())
