"""The folder of an artefact on disk: read as plain files only, and replaced as a whole or not at all.

    <parent>/<name>/                     a whole artefact or none
    <parent>/.<name>.<random>.tmp/       being written, or replaced, or left by a killed process

Whoever writes holds a lock on its temporary folder, which the kernel takes back when it dies: what is not locked may
be cleared away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tide_core.disk import sync
from tide_core.errors import ArtefactError
from tide_core.exits.artefact.manifest import MANIFEST_FILE, FileEntry

CHUNK_BYTES = 2**20
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the folder: everything is then read relative to it, whatever happens to its name."""
    try:
        if not path.is_dir():
            raise ArtefactError("artefact", path, _not_a_folder(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ArtefactError("artefact", path, f"a folder that can be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise ArtefactError("artefact", path, "the path of an artefact folder") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _not_a_folder(path: Path) -> str:
    wanted = f"an artefact folder, with {MANIFEST_FILE} in it"
    if not os.path.lexists(path):
        return f"{wanted}; nothing was found at this path"
    return f"{wanted}; this path is no folder"


def names(folder: int) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise ArtefactError("artefact", error.strerror or str(error), "a folder that can be listed") from error


def read_bytes(folder: int, name: str, *, max_bytes: int) -> bytes:
    """A whole file, which must be a regular one."""
    chunks, left = [], max_bytes + 1
    with _file(folder, name) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise ArtefactError(f"file {name}", f"{size} bytes", f"at most {max_bytes}")
        while left and (chunk := os.read(descriptor, min(left, CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    if not left:
        raise ArtefactError(f"file {name}", f"more than {max_bytes} bytes", f"at most {max_bytes}")
    return b"".join(chunks)


def describe(folder: int, name: str) -> FileEntry:
    """Digest and size of a file that is not kept in memory."""
    digest, size = hashlib.sha256(), 0
    with _file(folder, name) as descriptor:
        while chunk := os.read(descriptor, CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(digest.hexdigest(), size)


@contextlib.contextmanager
def _file(folder: int, name: str) -> Iterator[int]:
    """Looked at before it is opened, because opening a pipe or a device can do something, and once more after."""
    try:
        _check_regular(name, os.stat(name, dir_fd=folder, follow_symlinks=False))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            _check_regular(name, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise ArtefactError(f"file {name}", "nothing", "a file of this name in the artefact folder") from error
    except OSError as error:
        raise ArtefactError(f"file {name}", error.strerror or str(error), "a file that can be read") from error


def _check_regular(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        came = kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")
        raise ArtefactError(f"file {name}", came, "a regular file")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to fill. If the body ends well it takes the place of `folder`; if not, nothing has happened."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(folder)
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            sync(temporary)
            _swap(temporary, folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # unfinished, or what was replaced
            os.close(lock)
    except OSError as error:
        raise ArtefactError("artefact", folder, f"a folder that can be written: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        _clear_leftovers(folder)


def write(path: Path, data: bytes) -> None:
    """A new file that is on the disk when this returns."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _swap(temporary: Path, folder: Path) -> None:
    """Give `temporary` the name of `folder`, and, where there was such a folder, the other way round."""
    if not os.path.lexists(folder):
        os.rename(temporary, folder)
        return
    library = ctypes.CDLL(None, use_errno=True)
    here, paths = -100, (os.fsencode(temporary), os.fsencode(folder))  # AT_FDCWD; the paths are absolute
    if hasattr(library, "renameat2"):
        if library.renameat2(here, paths[0], here, paths[1], RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # A file system that cannot exchange names: for a moment there is no folder of this name, but never half of one.
    aside = _temporary(folder)
    os.rename(folder, aside)
    try:
        os.rename(temporary, folder)
    except BaseException:
        os.rename(aside, folder)
        raise
    os.rename(aside, temporary)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")


def _clear_leftovers(folder: Path) -> None:
    """Remove what killed processes left; what a living one is writing is locked."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f".{folder.name}.") and path.name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)
