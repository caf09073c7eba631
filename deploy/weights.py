"""Weights from an object store, as a folder on this machine.

    <parent>/<name>/                        a complete model, which never changes
    <parent>/.<name>.<16 hex>.partial/      being downloaded, or left by a killed process, which another one continues

A file counts as downloaded when it has its name, which it gets when it is complete.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy.object_store import files_in, is_url, open_store, refuse_credentials
from tide_core.disk import sync, write_whole
from tide_core.errors import ModelError
from tide_core.models.folder import check_folder
from tide_core.models.hub import ALLOWED_FILES, IGNORED_FILES
from tide_core.models.model_cache import default_cache_dir

logger = logging.getLogger("tide")

SOURCE = ".tide-source.json"
"""In a downloaded folder: the files of the store that it was made of."""
CHUNK_BYTES = 2**24
DOWNLOADS = 8
"""Files that are downloaded at a time."""
CONTENTS = "the files of a model (config.json, safetensors, tokenizer) directly in it"


def local_model(model: str, cache_dir: Path | None = None) -> str:
    """The setting `model` as the engine takes it: a URL is downloaded into the cache, anything else stays.

    Other files at the URL make another folder, so a model that is in use never changes."""
    if not is_url(model):
        return model
    listing = _Listing(model)
    root = (cache_dir or default_cache_dir()) / "stores"
    return str(listing.download(root / f"{listing.name}-{listing.digest}"))


def fetch_model(url: str, models: Path) -> Path:
    """Download the model at a URL to `models`/<last part of the URL>. A complete one of the same files stays."""
    listing = _Listing(url)
    return listing.download(models / listing.name)


class _Listing:
    """The files of a model in a store."""

    def __init__(self, url: str) -> None:
        refuse_credentials("model", url)
        self.url = url
        self._store, self._root = open_store(url, "model")
        self.name = self._root.rstrip("/").rpartition("/")[2]
        if not self.name:
            raise ModelError("model", url, "a URL with a folder after the bucket")
        try:
            found = files_in(self._store, self._root)
        except OSError as error:
            raise ModelError("model", url, f"a folder that can be listed: {error}") from error
        self.files: Mapping[str, tuple[int, int]] = {
            info.base_name: (int(info.size), int(info.mtime_ns or 0)) for info in found if _is_wanted(info.base_name)
        }
        if not self.files:
            raise ModelError("model", url, f"{CONTENTS}; there is none")
        self.digest = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def record(self) -> dict[str, Any]:
        return {"url": self.url, "files": {name: list(facts) for name, facts in self.files.items()}}

    def download(self, folder: Path) -> Path:
        partial = folder.with_name(f".{folder.name}.{self.digest}.partial")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f".{folder.name}.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process downloads, the others wait and find it complete
                if folder.exists():
                    self._check_same(folder)
                    return folder
                partial.mkdir(exist_ok=True)
                self._copy_missing(partial)
                check_folder(partial)
                write_whole(partial / SOURCE, json.dumps(self.record, sort_keys=True).encode())
                sync(partial)
                os.rename(partial, folder)
                sync(folder.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelError("model", self.url, f"a download into {folder.parent} that works: {reason}") from error
        return folder

    def _check_same(self, folder: Path) -> None:
        try:
            same = json.loads((folder / SOURCE).read_text(encoding="utf-8")).get("files") == self.record["files"]
        except (OSError, ValueError, AttributeError):
            same = False
        if not same:
            expected = f"a name that is free in {folder.parent}: other files are in it, and a server may use them"
            raise ModelError("model", folder.name, expected)
        logger.info("%s is complete: nothing to download", folder)

    def _copy_missing(self, folder: Path) -> None:
        left = [name for name in self.files if not (folder / name).exists()]
        total = sum(self.files[name][0] for name in left)
        logger.info("downloading %d of %d files, %.1f GB, from %s", len(left), len(self.files), total / 1e9, self.url)
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            list(pool.map(lambda name: self._copy(name, folder), left))

    def _copy(self, name: str, folder: Path) -> None:
        part = folder / f".{name}.part"
        with self._store.open_input_stream(f"{self._root}/{name}") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        size, expected = part.stat().st_size, self.files[name][0]
        if size != expected:
            raise ModelError(f"file {name}", f"{size} bytes", f"{expected}, as the store lists it")
        os.rename(part, folder / name)
        logger.info("%s: %.1f GB", name, size / 1e9)


def _is_wanted(name: str) -> bool:
    """The files of a model that are fetched from the hub, too: no pickles, no second copies of the weights."""
    wanted = any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED_FILES)
    return wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED_FILES)
