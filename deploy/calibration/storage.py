"""Where runs are kept: a folder that all nodes see, or a store behind a URL, with a folder of its own on every node."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_core.calibration.files import RunFiles
from tide_core.disk import write_whole
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

FOLDER, ALIVE = "tide-run-", ".alive"
PUT_IS_WHOLE = ("s3", "gcs", "abfs")
"""Stores in which a file appears when its last byte is there. Elsewhere it gets its name by a move."""


@contextlib.contextmanager
def opened(storage: str, name: str) -> Iterator[RunFiles]:
    """The files of a run, for as long as the block lasts."""
    if "://" not in storage:
        yield RunFiles(Path(storage) / name)
        return
    with _own_folder() as folder:
        yield StoredFiles(place_of(storage, name), folder)


def place_of(storage: str, *names: str) -> str:
    """Something in a storage. Options of a URL stay at its end."""
    base, question, options = storage.partition("?") if "://" in storage else (storage, "", "")
    return "/".join((base.rstrip("/"), *names)) + question + options


def remove(storage: str, *names: str) -> None:
    """A folder in a storage, with all that is in it."""
    if "://" not in storage:
        shutil.rmtree(place_of(storage, *names), ignore_errors=True)
        return
    store, path = _store(place_of(storage, *names))
    with contextlib.suppress(FileNotFoundError):
        store.delete_dir(path)


class StoredFiles(RunFiles):
    """A run behind a URL. `bring` and `keep` copy whole files, and only those that have changed."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self._store, self._root = _store(url)
        self._here: dict[str, tuple[Any, ...]] = {}
        """Of the files that are the same here and there: what the store says of them."""

    def bring(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for name, info in zip(wanted, self._look(wanted), strict=True):
            path = self.path(name)
            if not info.is_file:
                path.unlink(missing_ok=True)
                self._here.pop(name, None)
            elif self._here.get(name) != _mark(info) or not path.exists():
                with self._store.open_input_file(f"{self._root}/{name}") as stream:
                    write_whole(path, stream.readall())
                self._here[name] = _mark(info)

    def keep(self, names: Iterable[str]) -> None:
        for name in names:
            path, there = self.folder / name, f"{self._root}/{name}"
            if not path.exists():
                self._remove(name)
                continue
            self._put(there, path.read_bytes())
            self._here[name] = _mark(self._look([name])[0])

    def replace(self, names: Sequence[str]) -> None:
        self._remove(names[-1])
        self.keep(names)

    def _remove(self, name: str) -> None:
        if self._look([name])[0].is_file:
            self._store.delete_file(f"{self._root}/{name}")
        self._here.pop(name, None)

    def _put(self, there: str, raw: bytes) -> None:
        whole = self._store.type_name in PUT_IS_WHOLE
        target = there if whole else f"{there}.{secrets.token_hex(8)}.tmp"
        if not whole:
            self._store.create_dir(there.rpartition("/")[0], recursive=True)
        with self._store.open_output_stream(target) as stream:
            stream.write(raw)
        if not whole:
            self._store.move(target, there)

    def _look(self, names: list[str]) -> list[FileInfo]:
        return self._store.get_file_info([f"{self._root}/{name}" for name in names]) if names else []


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for as long as the block lasts. Those of processes that were killed are removed by the next one."""
    for other in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError), (other / ALIVE).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, (Path(folder) / "begun").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (Path(folder) / "begun").rename(Path(folder) / ALIVE)  # under this name it was always held
        yield Path(folder)


def _mark(info: FileInfo) -> tuple[Any, ...]:
    return (info.size, info.mtime_ns)


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it: pyarrow's own, or any that fsspec knows."""
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
