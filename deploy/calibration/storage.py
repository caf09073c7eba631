"""The storage of runs: a folder that all nodes see, or an object store, with a local folder on every node."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_core.calibration.ledger import RunFiles
from tide_core.disk import write_whole
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

FOLDER, ALIVE = "tide-run-", ".alive"
ATOMIC_PUT = ("s3", "gcs", "abfs")
"""Stores in which a file appears only when it is complete. In others a file is written and then moved."""


@contextlib.contextmanager
def open_run(storage: str, name: str) -> Iterator[RunFiles]:
    """The files of a run, while the block runs."""
    if "://" not in storage:
        yield RunFiles(Path(storage) / name)
        return
    with _local_folder() as folder:
        yield RemoteRunFiles(location(storage, name), folder)


def location(storage: str, *names: str) -> str:
    """Path or URL of something in a storage; the options of a URL stay at its end."""
    base, question, options = storage.partition("?") if "://" in storage else (storage, "", "")
    return "/".join((base.rstrip("/"), *names)) + question + options


def remove(storage: str, *names: str) -> None:
    """Remove a folder of a storage."""
    if "://" not in storage:
        shutil.rmtree(location(storage, *names), ignore_errors=True)
        return
    store, path = _store(location(storage, *names))
    with contextlib.suppress(FileNotFoundError):
        store.delete_dir(path)


class RemoteRunFiles(RunFiles):
    """A run in an object store. `pull` and `push` copy whole files; `pull` copies only those that have changed."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self._store, self._root = _store(url)
        self._versions: dict[str, tuple[Any, ...]] = {}
        """Size and time in the store of the files that are the same in the local folder."""

    def pull(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for name, info in zip(wanted, self._stat(wanted), strict=True):
            path = self.path(name)
            if not info.is_file:
                path.unlink(missing_ok=True)
                self._versions.pop(name, None)
            elif self._versions.get(name) != _version(info) or not path.exists():
                with self._store.open_input_file(f"{self._root}/{name}") as stream:
                    write_whole(path, stream.readall())
                self._versions[name] = _version(info)

    def push(self, names: Iterable[str]) -> None:
        for name in names:
            path, target = self.folder / name, f"{self._root}/{name}"
            if not path.exists():
                self._remove(name)
                continue
            self._put(target, path.read_bytes())
            self._versions[name] = _version(self._stat([name])[0])

    def push_together(self, names: Sequence[str]) -> None:
        self._remove(names[-1])
        self.push(names)

    def _remove(self, name: str) -> None:
        if self._stat([name])[0].is_file:
            self._store.delete_file(f"{self._root}/{name}")
        self._versions.pop(name, None)

    def _put(self, target: str, raw: bytes) -> None:
        atomic = self._store.type_name in ATOMIC_PUT
        written = target if atomic else f"{target}.{secrets.token_hex(8)}.tmp"
        if not atomic:
            self._store.create_dir(target.rpartition("/")[0], recursive=True)
        with self._store.open_output_stream(written) as stream:
            stream.write(raw)
        if not atomic:
            self._store.move(written, target)

    def _stat(self, names: list[str]) -> list[FileInfo]:
        return self._store.get_file_info([f"{self._root}/{name}" for name in names]) if names else []


@contextlib.contextmanager
def _local_folder() -> Iterator[Path]:
    """A temporary folder while the block runs. Folders of killed processes are removed first."""
    for other in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError), (other / ALIVE).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, (Path(folder) / "begun").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (Path(folder) / "begun").rename(Path(folder) / ALIVE)  # a file of this name is always locked
        yield Path(folder)


def _version(info: FileInfo) -> tuple[Any, ...]:
    return (info.size, info.mtime_ns)


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it: of pyarrow, or any that fsspec supports."""
    from pyarrow import ArrowInvalid, fs

    try:
        store, path = fs.FileSystem.from_uri(url)
        return store, path
    except (ArrowInvalid, ValueError, OSError) as first:
        scheme, _, path = url.partition("://")
        try:
            import fsspec  # type: ignore[import-untyped]

            return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme))), path
        except Exception as error:
            expected = f"a folder, or a URL of a store that pyarrow or fsspec can open; {first}"
            raise ConfigError("storage", url, expected) from error
