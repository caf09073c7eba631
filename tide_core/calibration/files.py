"""Where the files of a run are. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


class RunFiles:
    """A folder that everyone who works on the run can see: what is written there is there for all.

    A run that is kept elsewhere has a folder of its own on every machine, and these two carry files to and fro."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bring(self, names: Iterable[str]) -> None:
        """Have these files in the folder, as they are now; one that nobody has written is not there afterwards."""

    def keep(self, names: Iterable[str]) -> None:
        """Have these files of the folder, or their absence, for everyone."""

    def replace(self, names: Sequence[str]) -> None:
        """As `keep`, of files that are one thing together, the last of which tells of the others: it is gone before the
        first of them changes, and back after all have."""

    def path(self, name: str) -> Path:
        """For a file of the run, in a folder that exists."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
