"""Object stores, by URL: s3://, gs://, abfss://, and any other that pyarrow or fsspec can open.

The one place that opens them: runs of a calibration, published artefacts and weights all come through here. Credentials
come from the store's own configuration (variables, files, the identity of a pod), never from a URL.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

ATOMIC_PUT = ("s3", "gcs", "abfs")
"""Stores in which a file appears only when it is complete. In others a file is written and then moved."""
SECRET = re.compile("key|secret|token|password|sig", re.IGNORECASE)
CONTAINER_FIRST = ("abfs", "abfss")
"""URL schemes that have a container name where others have a user."""


def is_url(place: str) -> bool:
    return "://" in place


def location(place: str, *names: str) -> str:
    """Path or URL of something in a folder; the options of a URL stay at its end."""
    base, question, options = place.partition("?") if is_url(place) else (place, "", "")
    return "/".join((base.rstrip("/"), *names)) + question + options


def refuse_credentials(field: str, place: str) -> None:
    """Raise if a URL holds a password or a key. The error does not show them."""
    try:
        url = urlsplit(place)
    except ValueError as error:
        raise ConfigError(field, place, f"a path or a URL: {error}") from error
    has_user = "@" in url.netloc and url.scheme not in CONTAINER_FIRST
    if has_user or any(SECRET.search(key) for key in parse_qs(url.query)):
        expected = "a URL without them: the store takes them from its own configuration"
        raise ConfigError(field, "credentials", expected)


def open_store(place: str, field: str = "storage") -> tuple[Any, str]:
    """The file system of a folder or URL, as pyarrow has it, and the path in it."""
    from pyarrow import ArrowInvalid, fs

    if not is_url(place):
        return fs.LocalFileSystem(), place
    try:
        store, path = fs.FileSystem.from_uri(place)
        return store, path
    except (ArrowInvalid, ValueError, OSError) as first:
        scheme, _, path = place.partition("://")
        try:
            import fsspec  # type: ignore[import-untyped]

            return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme))), path
        except Exception as error:
            expected = f"a folder, or a URL of a store that pyarrow or fsspec can open; {first}"
            raise ConfigError(field, place, expected) from error


def put(store: Any, target: str, raw: bytes) -> None:
    """Write a file that appears whole, in place of one that was there."""
    atomic = store.type_name in ATOMIC_PUT
    written = target if atomic else f"{target}.{secrets.token_hex(8)}.tmp"
    if not atomic:
        store.create_dir(target.rpartition("/")[0], recursive=True)
    with store.open_output_stream(written) as stream:
        stream.write(raw)
    if not atomic:
        store.move(written, target)


def files_in(store: Any, path: str) -> list[FileInfo]:
    """The files directly in a folder, by name; none if there is no such folder."""
    from pyarrow.fs import FileSelector

    found = store.get_file_info(FileSelector(path, allow_not_found=True))
    return sorted((info for info in found if info.is_file), key=lambda info: str(info.base_name))
