"""Published artefacts: versions that never change, and a pointer to the one in use.

    <place>/versions/<digest>/     an artefact, complete when its manifest.json is there
    <place>/current.json           the pointer: which version is in use, which was before, who moved it and when
    <place>/moves/<time>-….json    every move of the pointer, for the record

A place is a folder that all nodes see, or the URL of one in an object store. A service whose `artefact` is
`<place>/current.json` follows the pointer; moving it back goes back to the version before.

python -m deploy.published publish FOLDER PLACE     add a version and point to it
python -m deploy.published point PLACE DIGEST       point to another version; `previous` for the one before
python -m deploy.published show PLACE               versions, and the moves of the pointer
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.object_store import files_in, is_url, open_store, put, refuse_credentials
from tide_core.cli.exit_codes import with_exit_code
from tide_core.errors import ArtefactError

CURRENT, VERSIONS, MOVES, MANIFEST = "current.json", "versions", "moves", "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{64}")
PREVIOUS = "previous"
CHUNK_BYTES = 2**24
MAX_POINTER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Pointer:
    """Which version is in use."""

    digest: str
    previous: str | None
    by: str
    """Who moved it: a run of a calibration, or a person."""
    at: str

    @classmethod
    def read(cls, raw: bytes, place: str) -> Pointer:
        try:
            values = json.loads(raw)
            pointer = cls(**values)
        except (ValueError, TypeError) as error:
            raise ArtefactError("artefact", place, f"a pointer that `deploy.published` wrote: {error}") from error
        named = [pointer.digest] if pointer.previous is None else [pointer.digest, pointer.previous]
        if not all(isinstance(each, str) and DIGEST.fullmatch(each) for each in named):
            raise ArtefactError("artefact", place, "a pointer to versions by their 64 hexadecimal digits")
        return pointer


class Publication:
    """The versions at one place."""

    def __init__(self, place: str) -> None:
        refuse_credentials("artefact", place)
        self.place = place if is_url(place) else str(Path(place).expanduser().absolute())
        self._store, self._root = open_store(self.place, "artefact")
        self._root = self._root.rstrip("/")

    def pointer(self) -> Pointer | None:
        """None where nothing is published yet."""
        try:
            with self._store.open_input_stream(f"{self._root}/{CURRENT}") as stream:
                raw = stream.read(MAX_POINTER_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtefactError("artefact", self.place, f"a pointer that can be read: {error}") from error
        return Pointer.read(raw, self.place)

    def versions(self) -> list[str]:
        from pyarrow.fs import FileSelector

        found = self._store.get_file_info(FileSelector(f"{self._root}/{VERSIONS}", allow_not_found=True))
        names = sorted(info.base_name for info in found if not info.is_file and DIGEST.fullmatch(info.base_name))
        return [name for name in names if self._is_complete(name)]

    def moves(self) -> list[Pointer]:
        """All moves of the pointer, the first one first."""
        found = []
        for info in files_in(self._store, f"{self._root}/{MOVES}"):
            with self._store.open_input_stream(info.path) as stream:
                found.append(Pointer.read(stream.read(MAX_POINTER_BYTES), info.path))
        return sorted(found, key=lambda move: move.at)

    def publish(self, folder: Path, by: str) -> Pointer:
        """Add the artefact in `folder` and point to it. A version that is there already is not written again."""
        from tide_core.exits.artefact.artefact import load_artefact

        artefact = load_artefact(folder, None)
        if not self._is_complete(artefact.digest):
            for name in (*artefact.manifest.files, MANIFEST):  # the manifest last: with it the version is complete
                put(self._store, f"{self._version(artefact.digest)}/{name}", (folder / name).read_bytes())
        return self.point(artefact.digest, by)

    def point(self, digest: str, by: str) -> Pointer:
        """Point to a version: its digest, the first 8 or more digits of it, or `previous`."""
        now = self.pointer()
        wanted = self._find(digest, now)
        if now is not None and now.digest == wanted:
            return now
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        pointer = Pointer(wanted, None if now is None else now.digest, by, at)
        raw = json.dumps(asdict(pointer), indent=2).encode() + b"\n"
        put(self._store, f"{self._root}/{MOVES}/{at.replace(':', '')}-{wanted[:16]}.json", raw)
        put(self._store, f"{self._root}/{CURRENT}", raw)
        return pointer

    def local(self, digest: str, cache_dir: Path) -> Path:
        """The folder of a version on this machine, checked to be that version; one in a store is downloaded."""
        if not is_url(self.place):
            folder = Path(self._version(digest))
            _check_digest(folder, digest)
            return folder
        return download(self._store, self._version(digest), cache_dir, digest)

    def setting(self, digest: str) -> str:
        """The setting `artefact` that names one version, whatever the pointer does."""
        base, question, options = self.place.partition("?") if is_url(self.place) else (self.place, "", "")
        return f"{base.rstrip('/')}/{VERSIONS}/{digest}{question}{options}"

    def _version(self, digest: str) -> str:
        return f"{self._root}/{VERSIONS}/{digest}"

    def _is_complete(self, digest: str) -> bool:
        return bool(self._store.get_file_info(f"{self._version(digest)}/{MANIFEST}").is_file)

    def _find(self, digest: str, now: Pointer | None) -> str:
        if digest == PREVIOUS:
            if now is None or now.previous is None:
                raise ArtefactError("version", PREVIOUS, f"a pointer in {self.place} that was moved before")
            return now.previous
        found = [each for each in self.versions() if each.startswith(digest)] if len(digest) >= 8 else []
        if len(found) != 1:
            known = ", ".join(each[:16] for each in self.versions()) or "none"
            raise ArtefactError("version", digest, f"{PREVIOUS}, or 8 or more digits of one of: {known}")
        return found[0]


def download(store: Any, path: str, cache_dir: Path, digest: str | None = None) -> Path:
    """Copy an artefact of a store to <cache_dir>/artefacts/<its digest>, where it appears whole and never changes."""
    from tide_core.exits.artefact.artefact import load_artefact

    cache = cache_dir / "artefacts"
    if digest is not None and (cache / digest).exists():
        return cache / digest
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=cache, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary) / "artefact"
            folder.mkdir()
            for info in files_in(store, path):
                with store.open_input_stream(info.path) as source, (folder / info.base_name).open("wb") as copy:
                    shutil.copyfileobj(source, copy, CHUNK_BYTES)
            got = load_artefact(folder, None).digest
            if digest not in (None, got):
                raise ArtefactError("artefact", path, f"the version {digest}; its files are those of {got}")
            _rename_if_new(folder, cache / got)
    except OSError as error:
        raise ArtefactError("artefact", path, f"a folder of a store that can be copied to {cache}: {error}") from error
    return cache / got


def _check_digest(folder: Path, digest: str) -> None:
    from tide_core.exits.artefact.artefact import load_artefact

    got = load_artefact(folder, None).digest
    if got != digest:
        raise ArtefactError("artefact", folder, f"the version {digest}; its files are those of {got}")


def _rename_if_new(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process was quicker, with the same bytes
            raise


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Published artefacts and their pointer.")
Place = Annotated[str, typer.Argument(help="A folder that all nodes see, or the URL of one in an object store.")]


@app.command("publish")
@with_exit_code
def publish_command(
    folder: Annotated[Path, typer.Argument(help="Folder of an artefact.")],
    place: Place,
    by: Annotated[str | None, typer.Option(help="For the record; default: you.")] = None,
) -> None:
    """Add a version and point to it."""
    _echo(Publication(place).publish(folder, by or getpass.getuser()))


@app.command("point")
@with_exit_code
def point_command(
    place: Place,
    version: Annotated[str, typer.Argument(help="A digest, 8 or more digits of one, or `previous`.")],
    by: Annotated[str | None, typer.Option(help="For the record; default: you.")] = None,
) -> None:
    """Point to another version."""
    _echo(Publication(place).point(version, by or getpass.getuser()))


@app.command("show")
@with_exit_code
def show_command(place: Place) -> None:
    """List the versions, and the moves of the pointer."""
    publication = Publication(place)
    now = publication.pointer()
    for digest in publication.versions():
        typer.echo(f"{'*' if now is not None and now.digest == digest else ' '} {digest}")
    for move in publication.moves():
        typer.echo(f"{move.at}  {(move.previous or 'nothing')[:16]} -> {move.digest[:16]}  by {move.by}")


def _echo(pointer: Pointer) -> None:
    typer.echo(f"current: {pointer.digest} (before: {pointer.previous or 'nothing'})")


if __name__ == "__main__":
    app()
