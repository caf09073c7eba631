"""The storage of runs: a folder that all nodes see, or an object store, with a local folder on every node."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.object_store import is_url, location, open_store, put
from tide_core.calibration.ledger import RunFiles
from tide_core.disk import write_whole

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

FOLDER, ALIVE = "tide-run-", ".alive"


@contextlib.contextmanager
def open_run(storage: str, name: str) -> Iterator[RunFiles]:
    """The files of a run, while the block runs."""
    if not is_url(storage):
        yield RunFiles(Path(storage) / name)
        return
    with _local_folder() as folder:
        yield RemoteRunFiles(location(storage, name), folder)


def remove(storage: str, *names: str) -> None:
    """Remove a folder of a storage."""
    if not is_url(storage):
        shutil.rmtree(location(storage, *names), ignore_errors=True)
        return
    store, path = open_store(location(storage, *names))
    with contextlib.suppress(FileNotFoundError):
        store.delete_dir(path)


class RemoteRunFiles(RunFiles):
    """A run in an object store. `pull` and `push` copy whole files; `pull` copies only those that have changed."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self._store, self._root = open_store(url)
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
            put(self._store, target, path.read_bytes())
            self._versions[name] = _version(self._stat([name])[0])

    def push_together(self, names: Sequence[str]) -> None:
        self._remove(names[-1])
        self.push(names)

    def _remove(self, name: str) -> None:
        if self._stat([name])[0].is_file:
            self._store.delete_file(f"{self._root}/{name}")
        self._versions.pop(name, None)

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
