"""What rows did in a step, counted. Most rows of a step did the same, and so they are counted together.

An entry stands for one row and step: exit layers and audits of the tokens it gained, the layers that ran for it, what
became of its drafts, and whether that tells something about the drafts of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tide_core.batch import DraftCounts
from tide_core.engine.exit_stats import ExitStats
from tide_core.request import Audit

Entry = tuple[tuple[int, ...], tuple[Audit, ...], int, tuple[DraftCounts, ...], bool]
Drafts = Sequence[tuple[DraftCounts, int]]
"""What became of drafts, and of how many rows."""
ALL_VERIFIED: tuple[Audit, ...] = ()
"""Instead of the audit of each token: to look them up takes longer than all the rest."""


class Sums(NamedTuple):
    """Of what one request did."""

    exits: dict[int, int]
    """Output tokens by exit layer."""
    layers_run: int
    deep_passes: int
    num_drafts: int
    num_accepted: int


class Tally:
    """Entries since the last time they were taken."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._entries: dict[Entry, int] = {}

    def add(self, entry: Entry, mine: dict[Entry, int]) -> None:
        """Count it, here and among those of its request. Raises where a layer cannot be."""
        entries = self._entries
        times = entries.get(entry)
        if times is None:
            ExitStats(self._num_layers).record(_exits(entry), 0)
            times = 0
        entries[entry] = times + 1
        mine[entry] = mine.get(entry, 0) + 1

    def take(self, stats: ExitStats, on_drafts: Callable[[Drafts], None] | None) -> None:
        """Move all of it there; `on_drafts` hears of drafts that tell something about others."""
        entries, self._entries = self._entries, {}
        telling: list[tuple[DraftCounts, int]] = []
        for entry, times in entries.items():
            _, _, layers_run, counts, tells = entry
            drafted, non_finite = sum([each.drafted for each in counts]), sum([each.non_finite for each in counts])
            ran = layers_run, len(counts), drafted, _accepted(entry), non_finite
            stats.record(_exits(entry), *ran, times=times)
            if tells:
                telling += [(each, times) for each in counts if each.allowed]
        if telling and on_drafts is not None:
            on_drafts(telling)


def sums(entries: Mapping[Entry, int]) -> Sums:
    """What they come to."""
    exits: dict[int, int] = {}
    layers_run = deep_passes = num_drafts = num_accepted = 0
    for entry, times in entries.items():
        exit_layers, _, ran, counts, _ = entry
        for layer in exit_layers:
            exits[layer] = exits.get(layer, 0) + times
        layers_run += ran * times
        deep_passes += len(counts) * times
        num_drafts += sum([each.drafted for each in counts]) * times
        num_accepted += _accepted(entry) * times
    return Sums(exits, layers_run, deep_passes, num_drafts, num_accepted)


def _accepted(entry: Entry) -> int:
    """Drafts that became output. Each pass gives one token more; the text may have ended among them."""
    left, num = len(entry[0]), 0
    for each in entry[3]:
        num += min(each.accepted, left)
        left -= min(each.accepted + 1, left)
    return num


def _exits(entry: Entry) -> Iterable[tuple[int, Audit]]:
    exit_layers, audits, *_ = entry
    return zip(exit_layers, audits or [Audit.VERIFIED] * len(exit_layers), strict=True)
