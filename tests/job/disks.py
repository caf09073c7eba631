"""Disks that are full or read-only, really: file systems mounted for a test, which takes the right to mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BLOCK = 4096


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of that size at `folder`."""
    folder.mkdir(parents=True)
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs"):
        yield folder


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written below `folder`, even by root and even by those who have files open there."""
    with _mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """No block is left on the file system of `folder`, which is a small one."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(BLOCK))
    assert os.statvfs(folder).f_bfree == 0
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _mounted(folder: Path, *options: str) -> Iterator[None]:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        os.sync()
        subprocess.run(["umount", "-l", str(folder)], check=True)
