"""Atomic file writes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, raw: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` by `raw` in one rename that survives a loss of power.

    The file has `mode`, less the process's umask, from its first byte on."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # the error of a full disk names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
