"""Benchmarks that no test runs still have all that they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module('benchmarks.' + name)"


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__init__")
    assert "transport_app" in names
    command = [sys.executable, "-c", IMPORT, *names]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
