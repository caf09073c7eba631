"""Where a replica's exits come from: the setting `artefact` as a folder on this machine.

| setting | what the engine gets |
|---|---|
| `auto`, `none`, a folder | the same |
| the URL of an artefact's folder | a copy in the cache |
| `<place>/current.json`, a path or a URL | the version that this pointer names (`deploy.published`); it is followed |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deploy.object_store import is_url, open_store, refuse_credentials
from deploy.published import CURRENT, Pointer, Publication, download
from tide_core.errors import ArtefactError
from tide_core.models.model_cache import default_cache_dir

logger = logging.getLogger("ray.serve")

NOTHING = "auto"
"""What the engine gets while nothing is published: the shipped exits of the demo model, full depth for others."""
Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class LocalArtefact:
    """A setting that was resolved."""

    folder: str
    """What the engine takes."""
    pinned: str | None = None
    """Of a URL or a pointer, which the engine does not know: the setting that names the same exits whatever moves."""
    pointer: Pointer | None = None


class ArtefactSource:
    """Resolves settings of one replica. Its methods block: they read files, and may download."""

    def __init__(self, own: str, cache_dir: Path | None = None) -> None:
        self._own, self._cache_dir = own, cache_dir
        self._places: dict[str, Publication] = {}
        self._tried: dict[str, str | None] = {}
        """The version that each pointer named when it was resolved last."""
        self._taken: str | None = None

    @property
    def is_followed(self) -> bool:
        """Whether the engine's own setting is a pointer."""
        return self._place_of(self._own) is not None

    def local(self, setting: str | None) -> LocalArtefact:
        """The exits that a policy names; None: those of the engine's settings."""
        wanted = self._own if setting is None else setting
        if (place := self._followed(wanted)) is not None:
            return self._at(place, place.pointer())
        if not is_url(wanted):
            return LocalArtefact(wanted)
        refuse_credentials("artefact", wanted)
        store, path = open_store(wanted, "artefact")
        return LocalArtefact(str(download(store, path.rstrip("/"), self._cache)), wanted)

    def first(self, load: Callable[[str], Loaded]) -> Loaded:
        """Load with the engine's own exits, or, where the version that a pointer names is refused, with the one before:
        a replica that starts must not depend on what was published last."""
        place = self._followed(self._own)
        if place is None:
            return load(self.local(None).folder)
        pointer = place.pointer()
        try:
            return load(self._at(place, pointer).folder)
        except ArtefactError as error:
            if pointer is None or pointer.previous is None:
                raise
            logger.error("tide: version %s of %s is refused: %s", pointer.digest[:16], place.place, error)
            before = place.local(pointer.previous, self._cache)
        logger.error("tide: starting with the version before it, %s", pointer.previous[:16])
        return load(str(before))

    def has_moved(self, setting: str | None) -> bool:
        """Whether the pointer that this setting names has another version than when it was resolved last."""
        place = self._followed(self._own if setting is None else setting)
        if place is None:
            return False
        pointer = place.pointer()
        return (None if pointer is None else pointer.digest) != self._tried.get(place.place)

    def taken(self, artefact: LocalArtefact) -> None:
        """Note that these exits are in force: one log line for each change, as a record."""
        pointer = artefact.pointer
        if pointer is not None and pointer.digest != self._taken:
            before = self._taken or "nothing"
            logger.info(
                "tide: published artefact: %s -> %s, by %s at %s",
                before[:16],
                pointer.digest[:16],
                pointer.by,
                pointer.at,
            )
        self._taken = None if pointer is None else pointer.digest

    @property
    def _cache(self) -> Path:
        return self._cache_dir or default_cache_dir()

    def _at(self, place: Publication, pointer: Pointer | None) -> LocalArtefact:
        if pointer is None:
            self._tried[place.place] = None
            logger.info("tide: nothing is published at %s yet", place.place)
            return LocalArtefact(NOTHING, NOTHING)
        try:
            folder = place.local(pointer.digest, self._cache)
        except ArtefactError as error:
            if not isinstance(error.__cause__, OSError):  # else a store or disk failed, and it is tried again
                self._tried[place.place] = pointer.digest
            raise
        self._tried[place.place] = pointer.digest
        return LocalArtefact(str(folder), place.setting(pointer.digest), pointer)

    def _place_of(self, setting: str) -> str | None:
        """The place of the pointer that a setting names."""
        base, question, options = setting.partition("?") if is_url(setting) else (setting, "", "")
        return base.removesuffix(f"/{CURRENT}") + question + options if base.endswith(f"/{CURRENT}") else None

    def _followed(self, setting: str) -> Publication | None:
        name = self._place_of(setting)
        if name is None:
            return None
        if name not in self._places:
            self._places[name] = Publication(name)
        return self._places[name]
