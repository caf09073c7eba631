"""What rows did in a step, counted. Most rows of a step did the same, and so they are counted together.

An entry stands for one row and step: exit layers and audits of the tokens it gained, the layers that ran for it, what
became of its drafts, and whether that tells something about the drafts of others. There are few different ones, some
hundred where a step has several cycles: what each comes to is found out once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tide_core.batch import DraftCounts
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit

Entry = tuple[tuple[int, ...], tuple[Audit, ...], int, tuple[DraftCounts, ...], bool]
Drafts = Sequence[tuple[DraftCounts, int]]
"""What became of drafts, and of how many rows."""
ALL_VERIFIED: tuple[Audit, ...] = ()
"""Instead of the audit of each token: to look them up takes longer than all the rest."""
MOST_KNOWN = 4096
"""Entries of which it is remembered what they come to."""


@dataclass(frozen=True, slots=True, eq=False)
class Did:
    """What an entry comes to. Two of them are the same only if they are one: they are looked up for every row."""

    per_layer: Mapping[int, int]
    """Output tokens by exit layer."""
    audits: Mapping[Audit, int]
    ran: tuple[int, int, int, int, int]
    """As `ExitStats.record` has it."""
    telling: Mapping[DraftCounts, int]
    """Of its passes, how many tell so about the drafts of others."""


class Sums(NamedTuple):
    """Of what one request did."""

    exits: dict[int, int]
    """Output tokens by exit layer."""
    layers_run: int
    deep_passes: int
    num_drafts: int
    num_accepted: int


class Tally:
    """What was done since the last time it was taken."""

    def __init__(self, num_layers: int) -> None:
        self._possible = ExitStats(num_layers)
        self._times: dict[Did, int] = {}

    def add(self, entry: Entry, mine: dict[Did, int]) -> None:
        """Count it, here and among those of its request. Raises where a layer cannot be."""
        did = did_of(entry)
        times = self._times.get(did)
        if times is None:
            self._possible.check(did.per_layer)
            times = 0
        self._times[did] = times + 1
        mine[did] = mine.get(did, 0) + 1

    def take(self, stats: ExitStats, on_drafts: Callable[[Drafts], None] | None) -> None:
        """Move all of it there; `on_drafts` hears of drafts that tell something about others."""
        all_times, self._times = self._times, {}
        telling: dict[DraftCounts, int] = {}
        for did, times in all_times.items():
            stats.add(did.per_layer, did.audits, did.ran, times)
            for counts, num in did.telling.items():
                telling[counts] = telling.get(counts, 0) + num * times
        if telling and on_drafts is not None:
            on_drafts(list(telling.items()))


def sums(all_times: Mapping[Did, int]) -> Sums:
    """What they come to."""
    exits: dict[int, int] = {}
    layers_run = deep_passes = num_drafts = num_accepted = 0
    for did, times in all_times.items():
        for layer, num in did.per_layer.items():
            exits[layer] = exits.get(layer, 0) + num * times
        ran, passes, drafted, accepted, _ = did.ran
        layers_run += ran * times
        deep_passes += passes * times
        num_drafts += drafted * times
        num_accepted += accepted * times
    return Sums(exits, layers_run, deep_passes, num_drafts, num_accepted)


@functools.lru_cache(maxsize=MOST_KNOWN)
def did_of(entry: Entry) -> Did:
    exit_layers, audits, layers_run, counts, tells = entry
    drafted, non_finite = sum([each.drafted for each in counts]), sum([each.non_finite for each in counts])
    ran = layers_run, len(counts), drafted, _accepted(len(exit_layers), counts), non_finite
    telling = Counter([each for each in counts if each.allowed]) if tells else {}
    return Did(Counter(exit_layers), Counter(audits or [Audit.VERIFIED] * len(exit_layers)), ran, telling)


def _accepted(left: int, counts: Sequence[DraftCounts]) -> int:
    """Drafts that became output, of so many tokens. Each pass gives one token more; the text may have ended among
    them."""
    num = 0
    for each in counts:
        num += min(each.accepted, left)
        left -= min(each.accepted + 1, left)
    return num
