"""How many drafts pay, by measured time. No torch here.

The cost table holds the seconds of a cycle for some numbers of rows and drafts, and of a step without exits, all
measured on this machine. With r rows, reach_j = the chance that a row drafts at least j tokens and keep_j = the chance
that at least j of them become output, both counted while the engine runs,

    tokens of a cycle of at most k drafts    1 + keep_1 + ... + keep_k         per row
    seconds of it                            cycle(r, 0) + slope_1 p_1 + ... + slope_k p_k

where slope_j = cycle(r, j) - cycle(r, j - 1) and p_j is the chance that any of the rows gets to its j-th draft pass.
On a GPU host and device work at the same time, and a step takes as long as the slower of both. The host's time per row
and per token is measured while the engine runs; the table holds the device's.

The plan is the k with the most tokens per second. If no k is faster than a step at full depth, the plan is 0. One of
64 such plans makes one draft nevertheless, if it pays by the calibrated acceptance: otherwise text that is hard to
draft would end drafting for good, since acceptance is counted only where there are drafts.

In a step of few rows keep_j is that of each row: the chance over all rows times a factor, how many of the row's drafts
were right lately over how many should have been. All rows make as many drafts nevertheless.

If rows have suffix drafts, two more kinds of plan are compared with it: these rows use theirs and the others draft by
exits; or no exit drafts, and these rows use as many as pay. Suffix drafts are known only when the step before is read,
so such a step is not launched ahead, and the host's time is added to the device's.

Chances are conditional: that the j-th draft is made, if one more was allowed and the (j-1)-th was made; and that it is
kept, if the (j-1)-th was. A chance without new tries keeps its value.
"""

from __future__ import annotations

import copy
import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from tide_core.batch import DraftCounts

LEAST_GAIN = 1.02
"""Least predicted speed-up of a plan over full depth: a margin for the noise of the measured table."""
PRIOR_WEIGHT = 30.0
"""Number of cycles that the calibrated acceptance counts for."""
MEMORY = 500.0
"""Number of cycles from which on older ones fade, so that chances follow the traffic."""
_FADE = 1.0 - 1.0 / MEMORY
PRIOR_REACH = 0.85
"""Chance that a draft follows a draft, before any observation."""
SUFFIX_SIZES = (3, 7, 15)
"""Limits on the suffix drafts of a row that are measured and planned: with the newest token 4, 8 and 16 tokens of the
deep pass."""
ROWS_APART = 4
"""Most rows of a step whose acceptance is counted row by row. All rows make as many drafts, so with more of them the
differences cancel out."""
ROW_WEIGHT, ROW_FADE = 3.0, 0.96
"""Drafts of all rows, in hits, that a row's own count against; and what is left of a row's counts after a cycle."""
PROBE_EVERY = 64
"""Of this many plans without drafts, the last one becomes a plan of one draft, if that pays by calibration."""
HOST_MEMORY, HOST_MEMORY_DOWN = 64.0, 8.0
"""Steps over which the host's time is smoothed, where it rises and where it falls."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Seconds at one number of rows."""

    rows: int
    full_s: float
    """Of a step at full depth, for requests that may not exit."""
    cycle_s: tuple[tuple[int, float], ...]
    """(drafts, seconds) of a cycle in which every row drafts that many; ascending, from 0 drafts."""
    suffix_s: tuple[tuple[int, float], ...] = ()
    """(drafts, seconds) of a cycle in which every row has that many suffix drafts; empty if not measured."""

    def cycle(self, drafts: int) -> float:
        known = [drafts for drafts, _ in self.cycle_s]
        return _interpolate(known, [seconds for _, seconds in self.cycle_s], drafts)

    def suffix_cycle(self, drafts: int) -> float:
        known = [drafts for drafts, _ in self.suffix_s]
        return _interpolate(known, [seconds for _, seconds in self.suffix_s], drafts)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Points by rising number of rows. Steps with more rows than the last one have no drafts."""

    points: tuple[CostPoint, ...]

    @property
    def max_rows(self) -> int:
        return self.points[-1].rows if self.points else 0

    def full(self, rows: int) -> float:
        return _interpolate([p.rows for p in self.points], [p.full_s for p in self.points], rows)

    def cycle(self, rows: int, drafts: int) -> float:
        return _interpolate([p.rows for p in self.points], [p.cycle(drafts) for p in self.points], rows)

    @property
    def max_suffix_rows(self) -> int:
        """Most rows with which suffix drafts were measured."""
        return max([point.rows for point in self.points if point.suffix_s], default=0)

    def suffix_cycle(self, rows: int, drafts: int) -> float:
        points = [point for point in self.points if point.suffix_s]
        return _interpolate([p.rows for p in points], [p.suffix_cycle(drafts) for p in points], rows)


@dataclass(slots=True)
class Prices:
    """Values of a table, cached by number of rows: they are read in every step."""

    table: CostTable
    max_drafts: int
    _full: dict[int, tuple[float, float]] = field(default_factory=dict)
    _slopes: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def full(self, num_rows: int) -> tuple[float, float]:
        """Rows per second at full depth, and seconds of a cycle without drafts."""
        found = self._full.get(num_rows)
        if found is None:
            found = num_rows / self.table.full(num_rows), self.table.cycle(num_rows, 0)
            self._full[num_rows] = found
        return found

    def slopes(self, num_drafting: int) -> tuple[float, ...]:
        """Seconds that each draft adds, from the first on."""
        found = self._slopes.get(num_drafting)
        if found is None:
            cycles = [self.table.cycle(num_drafting, drafts) for drafts in range(self.max_drafts + 1)]
            found = self._slopes[num_drafting] = tuple(max(0.0, more - less) for less, more in pairwise(cycles))
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """A number of drafts and what it promises."""

    drafts: int
    gain: float
    """Tokens per second over those of full depth; 1 for 0 drafts."""


class SuffixPlan(NamedTuple):
    """Numbers of drafts in a step in which some rows have suffix drafts."""

    drafts: int
    """Drafts by exits of each row that has no suffix drafts."""
    suffix: int
    """Most suffix drafts of a row that has some; 0: none are used."""


@dataclass(slots=True)
class Chance:
    """A share of hits, counted with exponential decay from a prior."""

    hits: float
    tries: float

    @property
    def value(self) -> float:
        return self.hits / self.tries

    def count(self, hits: int, tries: int) -> None:
        """Add tries of one step as if they came one after another with the hits spread evenly. Beyond MEMORY tries,
        each one makes those before it fade."""
        plain = min(tries, max(0, math.floor(MEMORY - self.tries) + 1))
        kept, share = _FADE ** (tries - plain), hits / tries
        added = (1.0 - kept) * MEMORY  # weights of the tries that fade, summed
        self.hits = (self.hits + plain * share) * kept + added * share
        self.tries = (self.tries + plain) * kept + added


@dataclass(slots=True)
class Acceptance:
    """Entry j - 1: the chance that a row makes its j-th draft if it made the one before, and that the j-th is kept if
    the one before was."""

    reached: list[Chance]
    kept: list[Chance]

    @classmethod
    def prior(cls, acceptance: Sequence[float], max_drafts: int) -> Acceptance:
        """From the chance, by distance, that a draft is right if those before it are."""
        rights = [acceptance[min(j, len(acceptance) - 1)] if acceptance else 0.0 for j in range(max_drafts)]
        return cls(
            [Chance(PRIOR_WEIGHT * PRIOR_REACH, PRIOR_WEIGHT) for _ in rights],
            [Chance(PRIOR_WEIGHT * PRIOR_REACH * right, PRIOR_WEIGHT) for right in rights],
        )

    def observe(self, drafts: Sequence[tuple[DraftCounts, int]]) -> None:
        """Count the cycles of a step: draft counts, each with the number of rows that have them."""
        _observe(self.reached, [(counts.allowed, counts.drafted, times) for counts, times in drafts])
        _observe(self.kept, [(counts.allowed, counts.accepted, times) for counts, times in drafts])


@dataclass(slots=True)
class RowAcceptance:
    """How many drafts of one row were right lately, and how many would have been by the acceptance of all rows."""

    hits: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """How much likelier a draft of this row is right than one of all rows. Cycles without drafts fade the counts,
        so that a row that was hard to draft is tried again."""
        return (ROW_WEIGHT + self.hits) / (ROW_WEIGHT + self.expected)


@dataclass(slots=True)
class DraftPlanner:
    """Decides, once per step, how many drafts each row makes."""

    max_drafts: int
    acceptance: Acceptance
    table: CostTable | None = None
    """None: always `max_drafts`."""
    calibrated: Acceptance | None = None
    """The acceptance that calibration measured; None: a copy of `acceptance` as it is at the start."""
    num_plans: int = 0
    num_full: int = 0
    """Plans without drafts."""
    last: Plan = field(default=Plan(0, 1.0))
    host_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the host's work per row and per token of a step, by number of rows."""
    steps_per_launch: int = 1
    """Most cycles of a launch such as the last one. The host works on a row once for all cycles of a launch, and the
    number of cycles grows until the device is busy. So a slow host alone does not make drafts pay."""
    pads: bool = False
    """Whether rows without drafts are padded to the number of drafts of the others, and cost as much."""
    _prices: Prices | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.calibrated is None:
            self.calibrated = copy.deepcopy(self.acceptance)

    def __call__(self, num_drafting: int, num_rows: int, factors: Sequence[float] = ()) -> int:
        """As `plan` says, or one draft as a probe."""
        plan = self.plan(num_drafting, num_rows, factors=factors)
        if plan.drafts == 0 and self.max_drafts and self.num_full % PROBE_EVERY == PROBE_EVERY - 1:
            probe = self.plan(num_drafting, num_rows, self.calibrated)
            plan = Plan(min(1, probe.drafts), plan.gain)
            self.num_full += plan.drafts > 0  # otherwise the next plan would probe, too
        self.num_plans += 1
        self.num_full += plan.drafts == 0
        self.last = plan
        return plan.drafts

    def plan(
        self,
        num_drafting: int,
        num_rows: int,
        acceptance: Acceptance | None = None,
        factors: Sequence[float] = (),
    ) -> Plan:
        """The best number of drafts for a step of `num_rows` rows of which `num_drafting` may draft. `factors`: of each
        of these (`RowAcceptance.factor`), or none if all are alike."""
        acceptance = acceptance or self.acceptance
        if self.table is None:
            return Plan(self.max_drafts, 1.0)
        if num_rows > self.table.max_rows:
            return Plan(0, 1.0)
        prices = self._prices
        if prices is None or prices.table is not self.table or prices.max_drafts != self.max_drafts:
            prices = self._prices = Prices(self.table, self.max_drafts)
        full_rate, seconds = prices.full(num_rows)
        host_s = self._host(num_rows)
        if host_s:
            full_rate = min(full_rate, 1.0 / (host_s * (1.0 / self.steps_per_launch + 1.0)))
        best, best_gain = 0, LEAST_GAIN
        tokens = float(num_rows)
        reach = keep = 1.0
        keeps = [1.0] * len(factors)
        for drafts, slope in enumerate(prices.slopes(num_drafting), 1):
            seconds += slope * (1.0 - (1.0 - reach) ** num_drafting)
            reach *= acceptance.reached[drafts - 1].value
            kept = acceptance.kept[drafts - 1].value
            if factors:
                keeps = [mine * min(1.0, kept * factor) for mine, factor in zip(keeps, factors, strict=True)]
                tokens += sum(keeps)
            else:
                keep *= kept
                tokens += num_drafting * keep
            gain = tokens / max(seconds, host_s * (num_rows / self.steps_per_launch + tokens)) / full_rate
            if gain > best_gain:
                best, best_gain = drafts, gain
        return Plan(best, best_gain) if best else Plan(0, 1.0)

    @property
    def max_suffix_rows(self) -> int:
        """Most rows of a step with suffix drafts; 0 if their cost is not known."""
        return 0 if self.table is None else self.table.max_suffix_rows

    def plan_suffix(self, num_drafting: int, num_rows: int, chances: Sequence[float]) -> SuffixPlan:
        """The best plan for a step of `num_rows` rows, of which `num_drafting` may draft by an exit. `chances` has one
        entry for each row with suffix drafts: the chance that one is right if those before it are. Call it right after
        the planner was called for the same step: that plan is what it is compared with."""
        plan, table = self.last if num_drafting else Plan(0, 1.0), self.table
        if table is None:
            return SuffixPlan(plan.drafts, 0)
        full_rate, full_s = num_rows / table.full(num_rows), table.full(num_rows)
        host_s = self._host(num_rows)
        best, best_rate = SuffixPlan(plan.drafts, 0), plan.gain * full_rate * LEAST_GAIN
        share = 1.0 if self.pads else len(chances) / num_rows
        options = [(0, suffix) for suffix in SUFFIX_SIZES]
        if plan.drafts:
            options.append((plan.drafts, plan.drafts))
        for drafts, suffix in options:
            tokens = num_rows + sum([_expected(chance, suffix) for chance in chances])
            if drafts:
                seconds = table.cycle(num_rows, drafts)
                kept = sum(accumulate([each.value for each in self.acceptance.kept[:drafts]], operator.mul))
                tokens += max(0, num_drafting - len(chances)) * kept
            else:
                seconds = full_s + share * max(0.0, table.suffix_cycle(num_rows, suffix) - full_s)
            rate = tokens / (seconds + host_s * (num_rows + tokens))
            if rate > best_rate:
                best, best_rate = SuffixPlan(drafts, suffix), rate
        return best

    def observe_host(self, num_rows: int, num_tokens: int, seconds: float, steps_per_launch: int = 1) -> None:
        """Record the seconds that the host worked in a step, without its waits for the device; `steps_per_launch` is
        the most cycles that the step's launch may have."""
        self.steps_per_launch = steps_per_launch
        each, known = seconds / (num_rows + num_tokens), self.host_s.get(num_rows)
        if known is None:
            self.host_s[num_rows] = each
        elif each < known:  # falls quickly: a slow step may have included work that is done once
            self.host_s[num_rows] += (each - known) / HOST_MEMORY_DOWN
        else:
            self.host_s[num_rows] += (min(each, 2.0 * known) - known) / HOST_MEMORY

    def _host(self, num_rows: int) -> float:
        """Seconds with so many rows, or with the nearest number that was seen; 0 before any was seen."""
        found = self.host_s.get(num_rows)
        if found is None and self.host_s:
            found = self.host_s[min(self.host_s, key=lambda rows: abs(rows - num_rows))]
        return found or 0.0

    def observe_row(self, mine: RowAcceptance, cycles: Sequence[DraftCounts]) -> None:
        """Record the cycles of one row, in a step of few rows."""
        for counts in cycles:
            mine.hits *= ROW_FADE
            mine.expected *= ROW_FADE
            if counts.allowed and not counts.from_suffix:
                tried = self.acceptance.kept[: min(counts.accepted + 1, counts.allowed)]
                mine.hits += counts.accepted
                mine.expected += sum([chance.value for chance in tried])

    def observe(self, drafts: Sequence[tuple[DraftCounts, int]]) -> None:
        """Count the cycles of a step, of rows that inform the planner."""
        self.acceptance.observe(drafts)


def _expected(chance: float, num: int) -> float:
    """Expected number of drafts that are right, up to the first wrong one, of `num`."""
    return float(num) if chance >= 1.0 else chance * (1.0 - chance**num) / (1.0 - chance)


def _observe(chances: Sequence[Chance], seen: Sequence[tuple[int, int, int]]) -> None:
    """`seen`: drafts that were allowed, hits, and the number of rows with both. A row counts as a try for each hit, and
    for the miss after them if the limit allowed one more; later drafts are unknown and not counted."""
    for index, chance in enumerate(chances):
        tries = sum([times for allowed, hits, times in seen if index < allowed and index <= hits])
        if not tries:
            return
        chance.count(sum([times for allowed, hits, times in seen if index < allowed and index < hits]), tries)


def _interpolate(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear interpolation between the two nearest places; linear extrapolation before the first and after the last."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    share = (at - low) / (high - low)
    return values[right - 1] + share * (values[right] - values[right - 1])
