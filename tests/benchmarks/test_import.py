"""Every module of the benchmarks can be imported, and every benchmark has an entry point."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import ROOT

IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
FOLDERS = {
    "block_drafter",
    "calibration",
    "clients",
    "copying",
    "engine",
    "fast_exits",
    "gpu",
    "kernels",
    "modes",
    "nodes",
    "production",
    "quantised",
    "recovery",
    "serving",
    "structured",
}


def test_every_module_can_be_imported() -> None:
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    assert "benchmarks.serving.transport_app" in names
    assert {f"benchmarks.{folder}.__main__" for folder in FOLDERS} <= {*names}
    command = [sys.executable, "-c", IMPORT, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
