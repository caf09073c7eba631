"""Converted models on disk, each in a folder named after its source's SHA-256.

    <cache>/models/<stem>-<16 hex>/            always complete: it appears by one rename
    <cache>/models/.<stem>-<16 hex>.<random>.tmp/   being written, or left by a killed process
    <cache>/models/.<stem>-<16 hex>.lock       held by the process that converts, repairs or clears the above

Every use checks every byte against the manifest (0.4 s for the 540 MB of the demo model on one core); a folder that
does not match is converted again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tide_core.disk import sync
from tide_core.errors import ModelError

log = logging.getLogger("tide")

# Increased whenever the converter's output changes, so that old folders are not used.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
ENVIRONMENT_VARIABLE = "TIDE_CACHE_DIR"
LOCK_LIMIT_S = 1800.0
LOCK_POLL_S = 0.1
MAX_STEM_CHARS = 100
NO_WEIGHTS = "-config"
"""Ends the name of a folder whose weights are read from their source."""
READ_BYTES = 2**24
"""Large pieces: each is read and hashed without Python's lock, next to a thread that imports libraries."""


def find_converted(source: Path, cache_dir: Path | None = None, *, weights: bool = True) -> Path | None:
    """The checked folder that was made from `source`; None if it is not there or not whole."""
    digest = _source_digest(source)
    folder = _folder_of(source, digest, cache_dir, weights)
    try:
        return folder if folder.exists() and find_fault(folder, digest) is None else None
    except OSError:
        return None  # `converted` meets it again, and says so


def converted(
    source: Path, convert: Callable[[Path, Path], None], cache_dir: Path | None = None, *, weights: bool = True
) -> Path:
    """The checked folder that `convert(source, empty_folder)` makes from `source`; converts if there is none. One
    without weights is another folder."""
    digest = _source_digest(source)
    folder = _folder_of(source, digest, cache_dir, weights)
    root = folder.parent.parent
    try:
        if not folder.exists() or find_fault(folder, digest) is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder):
                _clear_leftovers(folder)
                fault = find_fault(folder, digest) if folder.exists() else "not there"
                if fault is not None:
                    if folder.exists():
                        log.warning("cached model %s is broken (%s) and is built again", folder, fault)
                    _build(source, digest, convert, folder)
    except OSError as error:
        reason = error.strerror or str(error)
        expected = f"a folder that can be written and read, but: {reason}; set {ENVIRONMENT_VARIABLE} to another one"
        raise ModelError("cache directory", root, expected) from error
    return folder


def default_cache_dir() -> Path:
    try:
        return Path(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/tide-serve").expanduser().absolute()
    except RuntimeError as error:
        raise ModelError("cache directory", "~", f"a home directory; or set {ENVIRONMENT_VARIABLE}") from error


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a converted folder; None if there is none of this format version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(manifest, dict) and manifest.get("format_version") == FORMAT_VERSION
    known = known and isinstance(manifest.get("source"), dict) and isinstance(manifest.get("files"), dict)
    return manifest if known else None


def find_fault(folder: Path, source_digest: str) -> str | None:
    """What is wrong with a converted folder; None if every byte matches the manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"no {MANIFEST} of format version {FORMAT_VERSION}"
    if manifest["source"].get("sha256") != source_digest:
        return "it was made from another file"
    needed = {"config.json", "tokenizer.json"}
    if not folder.name.endswith(NO_WEIGHTS):
        needed.add("model.safetensors")
    if not needed <= manifest["files"].keys():
        return "the manifest lists too few files"
    for name, entry in manifest["files"].items():
        path = folder / name
        if Path(name).name != name or not isinstance(entry, dict) or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.get("size"):
            return f"{name} has {path.stat().st_size} bytes, not {entry.get('size')}"
        if sha256(path) != entry.get("sha256"):
            return f"{name} has another SHA-256"
    return None


def sha256(path: Path) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _folder_of(source: Path, digest: str, cache_dir: Path | None, weights: bool) -> Path:
    root = cache_dir if cache_dir is not None else default_cache_dir()
    return root / "models" / f"{source.stem[:MAX_STEM_CHARS]}-{digest[:16]}{'' if weights else NO_WEIGHTS}"


def _source_digest(source: Path) -> str:
    try:
        return sha256(source)
    except OSError as error:
        raise ModelError("gguf file", source, f"a readable file: {error.strerror or error}") from error


def _identity(source: Path) -> tuple[int, int]:
    try:
        status = source.stat()
    except OSError as error:
        raise ModelError("gguf file", source, f"a readable file: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns


def _build(source: Path, digest: str, convert: Callable[[Path, Path], None], folder: Path) -> None:
    before = _identity(source)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        convert(source, temporary)
        if _identity(source) != before:
            raise ModelError("gguf file", source, "a file that does not change while it is read")
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(temporary.iterdir())
        }
        origin = {"name": source.name, "size": before[0], "sha256": digest}
        manifest = {"format_version": FORMAT_VERSION, "source": origin, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if os.path.lexists(folder):
            os.rename(folder, _temporary(folder))
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        # Also after Ctrl-C. The folder of a killed process is cleared by the next one that holds the lock.
        _clear_leftovers(folder)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")


def _clear_leftovers(folder: Path) -> None:
    """Remove leftovers of unfinished conversions. The caller holds the lock, so none is in use."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f".{folder.name}.") and path.name.endswith(".tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time per folder. The kernel releases the lock when its holder dies."""
    path = folder.with_name(f".{folder.name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + LOCK_LIMIT_S
        waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    expected = f"to be free within {LOCK_LIMIT_S:.0f} s; another process is converting this model"
                    raise ModelError("model cache lock", path, expected) from None
                if not waiting:
                    log.info("waiting for another process that converts %s", folder.name)
                waiting = True
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
