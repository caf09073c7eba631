"""Cycles on their way: which rows they run, and what becomes of them once they are read.

A flight is a cycle, or several of the same rows: its legs, each of which goes on where the one before it ends.

A flight may be launched ahead, before the one before it was read. Then it is a guess that its rows go on: one may have
ended meanwhile, or have lost its blocks. What the flight does for such a row is lost and harms nobody: it writes behind
the row's end, and whoever has the blocks now writes to them later, for the device keeps the order. Whoever wants the
results asks with `find` which rows it runs as they are now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tide_core.batch import RowResult, RowStep
from tide_core.execution.graphs.cycle_graph import Side
from tide_core.execution.graphs.cycle_output import Said
from tide_core.execution.graphs.cycle_shape import RowPlace
from tide_core.execution.graphs.launch_depth import Pace
from tide_core.exits.accept import Drafted, Settler, make_result


@dataclass(slots=True, eq=False)
class Flight:
    """One launch. `each`: branches of every row, which come one behind another."""

    rows: Sequence[RowPlace]
    each: int
    side: Side
    begins: Sequence[int]
    """Where the tokens of each place begin in the deep pass."""
    settler: Settler
    legs: int = 1
    pace: Pace | None = None
    """That it was launched at."""
    ahead: Flight | None = None
    """What was launched behind this one before this one was read."""
    _starts: list[tuple[int, int]] = field(default_factory=list)
    """Token and position that the rows had when it ran, once that is known."""

    @property
    def drafts(self) -> int:
        """Of the row that has most."""
        return self.rows[0].drafts

    def find(self, rows: Sequence[RowStep]) -> dict[int, int]:
        """Where the rows are that it runs as they are now, with the token and at the position that the device ran them
        with: by their index, their number here."""
        mine, starts = self.rows, self._starts
        numbers = {id(place.step.table): number for number, place in enumerate(mine)}
        found: dict[int, int] = {}
        for index, row in enumerate(rows):
            table, token_ids = row.table, row.token_ids
            number = numbers.get(id(table))
            if number is None or len(token_ids) != 1 or starts[number] != (token_ids[0], table.lengths[-1]):
                continue
            if is_still(mine[number].step, mine[number].blocks, row):
                found[index] = number
        return found

    def results(self, wanted: Mapping[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        """Wait for the device. Of the rows that `find` has found, in the order of `wanted`."""
        legs = self.side.read()
        if self.ahead is not None:
            self.ahead.learn(legs[-1])
        if len(legs) == 1:
            return self._leg(legs[0], wanted, rows)
        found = self._sound_legs(legs, wanted, rows)
        others = {index: number for index, number in wanted.items() if index not in found}
        if others:
            went_on = list(zip(*[zip(*said.going_on, strict=True) for said in legs], strict=True))
            results = zip(*[self._leg(said, others, rows) for said in legs], strict=True)
            for (index, number), of_row in zip(others.items(), results, strict=True):
                found[index] = join(rows[index], of_row, went_on[number])
        return [found[index] for index in wanted]

    def _sound_legs(
        self, legs: Sequence[Said], wanted: Mapping[int, int], rows: Sequence[RowStep]
    ) -> dict[int, RowResult]:
        """What `join` makes of rows of which the device knows all, so that it need not be found out again how many of
        their drafts are right: by their index. Left out are those of which it does not."""
        num, end = len(self.begins), self.begins[-1] + self.rows[-1].drafts + 1
        if not all([said.is_finite(num, end) for said in legs]):
            return {}
        columns = [(said.going_on[1], said.following, *self._by_place(said)) for said in legs]
        found: dict[int, RowResult] = {}
        for index, number in wanted.items():
            step, drafts, begin = rows[index], self.rows[number].drafts, self.begins[number]
            end_ids = step.request.end_ids
            is_sound = step.policy.is_lossless and step.request.params.threshold is None
            before, gains = step.table.lengths[-1], tuple[int, ...]()
            token_ids, of_drafts = tuple[int, ...](), tuple[float | None, ...]()
            for positions, following, scores, drafted in columns:
                position, mine = positions[number], scores[number]
                gained, before = position - before, position
                is_sound = is_sound and 0 < gained <= drafts + 1 and end_ids.isdisjoint(drafted[number])
                token_ids += following[begin : begin + gained]
                of_drafts += mine[:gained] if gained <= drafts else (*mine[:drafts], None)
                gains += (gained,)
            if is_sound and end_ids.isdisjoint(token_ids):
                found[index] = self.settler.legs(drafts, gains, token_ids, of_drafts)
        return found

    def _by_place(self, said: Said) -> tuple[list[tuple[float, ...]], list[tuple[int, ...]]]:
        """Scores and tokens of the drafts of each place."""
        if not self.drafts:
            return [()] * len(self.begins), [()] * len(self.begins)
        return list(zip(*said.scores, strict=True)), list(zip(*said.drafted, strict=True))

    def _leg(self, said: Said, wanted: Mapping[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        if not self.drafts:
            best, best_ids = said.best, said.following
            return [self.settler.plain(best[number], best_ids[number]) for number in wanted.values()]
        by_place = list(zip(*self._by_place(said), strict=True))
        is_finite = said.is_finite(len(self.begins), self.begins[-1] + self.rows[-1].drafts + 1)
        return [self._result(rows[index], number, said, by_place, is_finite) for index, number in wanted.items()]

    def learn(self, said: Said) -> None:
        """Hear what the last cycle before has said: where the rows went on."""
        tokens, positions = said.going_on
        self._starts = [
            (step.token_ids[0], step.table.num_valid) if behind < 0 else (tokens[behind], positions[behind])
            for step, _, _, behind in self.rows
        ]

    def _result(
        self, step: RowStep, number: int, said: Said, by_place: Sequence[Drafted], is_finite: bool
    ) -> RowResult:
        drafts, place, each = self.rows[number].drafts, number * self.each, self.each
        # The branch whose first draft is what full depth says. A token that leaves for good is the likeliest.
        if each > 1 and step.policy.exit_thresholds[0] > 1.0:
            place += branch_of(said.following[self.begins[place]], said.drafted[0][place : place + each])
        begin = self.begins[place]
        end = begin + drafts + 1
        what = by_place[place], said.best[begin:end], said.following[begin:end]
        return self.settler.row(step, drafts, *what, branches=each, is_finite=is_finite)


def join(step: RowStep, legs: Sequence[RowResult], went_on: Sequence[tuple[int, int]]) -> RowResult:
    """What the legs of a flight give a row, up to the one in which its text ends, and as long as the device went on
    behind each leg with the token and at the position that follow from it: what it cannot know, a score or a logit that
    is no number, ends it too."""
    first, *others = legs
    request, last = step.request, first
    token_ids, exit_layers, scores, counts = first.token_ids, first.exit_layers, first.scores, first.counts
    num_valid, layers_run = first.num_valid, first.layers_run
    start, left = step.table.lengths[-1], request.params.max_tokens - len(step.output_ids)
    for leg, going_on in zip(others, went_on, strict=False):
        if leg.error is not None or (token_ids[-1:], start + num_valid) != ((going_on[0],), going_on[1]):
            break
        if len(token_ids) >= left or not request.end_ids.isdisjoint(last.token_ids):
            break
        token_ids += leg.token_ids
        exit_layers += leg.exit_layers
        scores += leg.scores
        counts += leg.counts
        num_valid += leg.num_valid
        layers_run += leg.layers_run
        last = leg
    if last is first:
        return first
    return make_result(token_ids, exit_layers, scores, num_valid, layers_run, counts)


def find_rows(told: Sequence[RowStep], blocks: Sequence[list[int]], rows: Sequence[RowStep]) -> dict[int, int]:
    """Which rows are those that a launch was told of, with these blocks, and still are: by their index, the number it
    has given them."""
    numbers = {id(row.table): number for number, row in enumerate(told)}
    found: dict[int, int] = {}
    for index, row in enumerate(rows):
        number = numbers.get(id(row.table))
        if number is None:
            continue
        if is_still(told[number], blocks[number], row):
            found[index] = number
    return found


def is_still(told: RowStep, blocks: list[int], row: RowStep) -> bool:
    """Whether a row is the one that a launch was told of, and its blocks begin with those that it had."""
    return told.request is row.request and told.policy is row.policy and row.table.block_ids[: len(blocks)] == blocks


def branch_of(right: int, tried: Sequence[int]) -> int:
    """The branch that has tried what is right first, or else the first."""
    return tried.index(right) if right in tried else 0
