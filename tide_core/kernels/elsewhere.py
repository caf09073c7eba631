"""The native module of another copy of this package: a Ray job runs in a copy of the sources that has no built files,
while the package is installed elsewhere. Only a copy with the same Python sources as ours is used."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

NAME = "_native"


def folders(package: str, own: list[str]) -> list[str]:
    """Where to look for the modules of the package: its own folder, and if need be one more."""
    if any(_has_module(Path(folder)) for folder in own):
        return own
    others = (Path(entry, *package.split(".")) for entry in sys.path)
    fitting = [str(other) for other in others if _has_module(other) and _sources(other) == _sources(Path(own[0]))]
    return [*own, *fitting[:1]]


def _has_module(folder: Path) -> bool:
    return any((folder / f"{NAME}{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _sources(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
