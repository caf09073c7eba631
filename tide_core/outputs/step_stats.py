"""Statistics per step. Most rows of a step do the same, so equal steps are counted together.

A `StepRecord` stands for one row and step. There are few different ones, some hundred where a launch holds several
steps, so the statistics of each are computed once and cached.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tide_core.batch import DraftCounts
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit

DraftStats = Sequence[tuple[DraftCounts, int]]
"""Draft counts of a deep pass, and in how many of them they occurred."""
ALL_VERIFIED: tuple[Audit, ...] = ()
"""Stands for the audits of a step whose tokens are all verified."""
CACHED_RECORDS = 4096


class StepRecord(NamedTuple):
    """What one row did in one step."""

    exit_layers: tuple[int, ...]
    audits: tuple[Audit, ...]
    """Of each token, or `ALL_VERIFIED`."""
    layers_run: int
    counts: tuple[DraftCounts, ...]
    informs_planner: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """The statistics of a record. Compared by identity: they are looked up for every row."""

    per_layer: Mapping[int, int]
    """Output tokens by exit layer."""
    audits: Mapping[Audit, int]
    ran: tuple[int, int, int, int, int]
    """As `ExitStats.record` takes it."""
    drafts: Mapping[DraftCounts, int]
    """Draft counts that inform the planner, and how often they occur."""


class Totals(NamedTuple):
    """Of all steps of one request."""

    exits: dict[int, int]
    """Output tokens by exit layer."""
    layers_run: int
    deep_passes: int
    num_drafts: int
    num_accepted: int
    num_differing: int


class PendingStats:
    """Statistics since the last flush."""

    def __init__(self, num_layers: int) -> None:
        self._possible = ExitStats(num_layers)
        self._times: dict[StepStats, int] = {}

    def add(self, record: StepRecord, steps: dict[StepStats, int]) -> None:
        """Count a record, here and among the steps of its request. Raises for an exit layer that does not exist."""
        stats = stats_of(record)
        times = self._times.get(stats)
        if times is None:
            self._possible.check(stats.per_layer)
            times = 0
        self._times[stats] = times + 1
        steps[stats] = steps.get(stats, 0) + 1

    def flush(self, exits: ExitStats) -> DraftStats:
        """Move all of it to `exits`; returns the draft counts that inform the planner."""
        all_times, self._times = self._times, {}
        drafts: dict[DraftCounts, int] = {}
        for stats, times in all_times.items():
            exits.add(stats.per_layer, stats.audits, stats.ran, times)
            for counts, num in stats.drafts.items():
                drafts[counts] = drafts.get(counts, 0) + num * times
        return list(drafts.items())


def totals(all_times: Mapping[StepStats, int]) -> Totals:
    exits: dict[int, int] = {}
    layers_run = deep_passes = num_drafts = num_accepted = num_differing = 0
    for stats, times in all_times.items():
        for layer, num in stats.per_layer.items():
            exits[layer] = exits.get(layer, 0) + num * times
        ran, passes, drafted, accepted, _ = stats.ran
        layers_run += ran * times
        deep_passes += passes * times
        num_drafts += drafted * times
        num_accepted += accepted * times
        num_differing += stats.audits.get(Audit.DISAGREED, 0) * times
    return Totals(exits, layers_run, deep_passes, num_drafts, num_accepted, num_differing)


@functools.lru_cache(maxsize=CACHED_RECORDS)
def stats_of(record: StepRecord) -> StepStats:
    exit_layers, audits, layers_run, counts, informs_planner = record
    drafted, non_finite = sum([each.drafted for each in counts]), sum([each.non_finite for each in counts])
    ran = layers_run, len(counts), drafted, _num_accepted(len(exit_layers), counts), non_finite
    drafts = Counter([each for each in counts if each.allowed and not each.from_suffix]) if informs_planner else {}
    return StepStats(Counter(exit_layers), Counter(audits or [Audit.VERIFIED] * len(exit_layers)), ran, drafts)


def _num_accepted(num_tokens: int, counts: Sequence[DraftCounts]) -> int:
    """Drafts that became output. Each pass gives one token more than it accepts; the text may end among them."""
    num = 0
    for each in counts:
        num += min(each.accepted, num_tokens)
        num_tokens -= min(each.accepted + 1, num_tokens)
    return num
