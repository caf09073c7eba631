"""The command as a whole: quick to start, and quiet about what it does not need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

Tide = Callable[..., tuple[int, str, str]]


def test_help_imports_no_torch() -> None:
    code = "import sys, tide_core.cli as c; c.main(['generate', '--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tide generate" in run.stdout
    assert run.stdout.endswith("False\n")


def test_version_is_one_line(tide: Tide) -> None:
    code, out, err = tide("--version")
    assert (code, err) == (0, "")
    assert out.startswith("tide ")
    assert out.count("\n") == 1
