"""A cycle on its way: which rows it runs, and what becomes of them once it is read.

A cycle may be launched ahead, before the one before it was read. Then it is a guess that its rows go on: one may have
ended meanwhile, or have lost its blocks. What the cycle does for such a row is lost and harms nobody: it writes behind
the row's end, and whoever has the blocks now writes to them later, for the device keeps the order. Whoever wants the
results asks with `find` which rows it runs as they are now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tide_core.batch import RowResult, RowStep
from tide_core.engine.cycle_graph import Side
from tide_core.engine.cycle_room import RowPlace
from tide_core.engine.cycle_said import Said
from tide_core.engine.greedy import Drafted, Settler


@dataclass(slots=True, eq=False)
class Flight:
    """One launch. `each`: branches of every row, which come one behind another."""

    rows: Sequence[RowPlace]
    each: int
    side: Side
    begins: Sequence[int]
    """Where the tokens of each place begin in the deep pass."""
    settler: Settler
    ahead: Flight | None = None
    """The cycle that was launched behind this one before this one was read."""
    _starts: list[tuple[int, int]] = field(default_factory=list)
    """Token and position that the rows had when it ran, once that is known."""

    @property
    def drafts(self) -> int:
        """Of the row that has most."""
        return self.rows[0].drafts

    def find(self, rows: Sequence[RowStep]) -> dict[int, int]:
        """Where the rows are that it runs as they are now: by their index, their number here."""
        found = find_rows([row.step for row in self.rows], [row.blocks for row in self.rows], rows)
        return {index: number for index, number in found.items() if self._stands(number, rows[index])}

    def _stands(self, number: int, row: RowStep) -> bool:
        """Whether the row goes on with the token, and where, that the device ran it with."""
        return len(row.token_ids) == 1 and self._starts[number] == (row.token_ids[0], row.table.num_valid)

    def results(self, wanted: Mapping[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        """Wait for the device. Of the rows that `find` has found, in the order of `wanted`."""
        said = self.side.read()
        if self.ahead is not None:
            self.ahead.learn(said)
        if not self.drafts:
            best, best_ids = said.best, said.following
            return [self.settler.plain(best[number], best_ids[number]) for number in wanted.values()]
        by_place = list(map(Drafted, zip(*said.scores, strict=True), zip(*said.drafted, strict=True)))
        return [self._result(rows[index], number, said, by_place) for index, number in wanted.items()]

    def learn(self, said: Said) -> None:
        """Hear what the cycle before has said: where the rows went on."""
        tokens, positions = said.going_on
        for step, _, _, behind in self.rows:
            known = step.token_ids[0], step.table.num_valid
            self._starts.append(known if behind < 0 else (tokens[behind], positions[behind]))

    def _result(self, step: RowStep, number: int, said: Said, by_place: Sequence[Drafted]) -> RowResult:
        drafts, place = self.rows[number].drafts, number * self.each
        if step.num_drafts != drafts:
            step = replace(step, num_drafts=drafts)
        # The branch whose first draft is what full depth says. A token that leaves for good is the likeliest.
        if self.each > 1 and step.policy.exit_thresholds[0] > 1.0:
            place += branch_of(said.following[self.begins[place]], said.drafted[0][place : place + self.each])
        begin = self.begins[place]
        end = begin + drafts + 1
        what = said.best[begin:end], said.following[begin:end]
        return self.settler.row(step, by_place[place], *what, branches=self.each)


def find_rows(told: Sequence[RowStep], blocks: Sequence[list[int]], rows: Sequence[RowStep]) -> dict[int, int]:
    """Which rows are those that a launch was told of, with these blocks, and still are: by their index, the number it
    has given them."""
    numbers = {id(row.table): number for number, row in enumerate(told)}
    found: dict[int, int] = {}
    for index, row in enumerate(rows):
        number = numbers.get(id(row.table))
        if number is None:
            continue
        one, own = told[number], blocks[number]
        if one.request is row.request and one.policy is row.policy and row.table.block_ids[: len(own)] == own:
            found[index] = number
    return found


def branch_of(right: int, tried: Sequence[int]) -> int:
    """The branch that has tried what is right first, or else the first."""
    return tried.index(right) if right in tried else 0
