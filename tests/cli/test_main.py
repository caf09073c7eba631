"""The command as a whole: quick to start, and quiet about what it does not need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

Tide = Callable[..., tuple[int, str, str]]


def test_help_imports_no_torch_and_no_server() -> None:
    heavy = "{'torch', 'ray', 'grpc', 'google.protobuf', 'fastapi'}"
    code = f"import sys, tide_core.cli as c; c.main(['generate', '--help']); print(*({heavy} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tide generate" in run.stdout
    assert run.stdout.endswith("\n\n")


def test_commands_of_other_packages_join_by_their_entry_points(tide: Tide) -> None:
    points = metadata.entry_points(group="tide.commands")
    assert {point.name for point in points} >= {"check-config", "client", "new-key"}
    for point in points:
        code, out, err = tide(point.name, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"Usage: tide {point.name} ")


def test_version_is_one_line(tide: Tide) -> None:
    code, out, err = tide("--version")
    assert (code, err) == (0, "")
    assert out.startswith("tide ")
    assert out.count("\n") == 1
