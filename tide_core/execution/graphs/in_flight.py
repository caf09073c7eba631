"""Steps in flight: launched cycles, which rows they run, and the results of these rows once they are read.

An in-flight step may be launched ahead, before the one before it is read. Then it is a guess that its rows continue:
one may have ended meanwhile, or lost its blocks. The work for such a row is lost and harms no other: it writes after
the row's end, and the next owner of the blocks writes to them later, since the device keeps the order. `find` tells
which rows an in-flight step runs as they are now.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from typing import NamedTuple

from tide_core.batch import NO_NOTE, NOT_READY, DraftCounts, RowResult, RowStep, TokenNote, TokenResult
from tide_core.execution.graphs.cycle_graph import CycleGraph, HostBuffer
from tide_core.execution.graphs.cycle_output import CycleOutput
from tide_core.execution.graphs.cycle_shape import RowPlace, end_of
from tide_core.execution.graphs.launch_depth import LaunchDepth
from tide_core.execution.graphs.masks import (
    Likeliest,
    checks_tokens,
    must_have_mask,
    needs_mask,
    obeyed,
    observe_masked,
)
from tide_core.exits.accept import counts, cycle_min_score
from tide_core.outputs.exit_stats import FROM_TEXT
from tide_core.request import Audit

ReadResults = Callable[[], list[RowResult]]
NO_SCORE = (None,)
ByPlace = list[tuple[tuple[float, ...], tuple[int, ...]]]
"""Scores and tokens of the drafts of each place."""


class Launched:
    """Rows that were launched. More rows than one launch can hold go in several, each when the one before is read."""

    def __init__(
        self,
        rows: Sequence[RowStep],
        groups: list[list[int]],
        launch: Callable[[list[RowStep]], ReadResults],
        running: tuple[list[int], ReadResults] | None = None,
        is_done: Callable[[], bool] | None = None,
    ) -> None:
        """`running` is launched already. With `is_done`, rows that are not done yet are not waited for."""
        self._rows, self._groups, self._launch = rows, groups, launch
        self._running = self._next() if running is None else running
        self._is_done = is_done

    def _next(self) -> tuple[list[int], ReadResults] | None:
        if not self._groups:
            return None
        group = self._groups.pop(0)
        return group, self._launch([self._rows[index] for index in group])

    def results(self) -> list[RowResult]:
        """Wait for the device; one result for each row."""
        found: dict[int, RowResult] = {}
        if self._is_done is not None and not self._is_done():
            self._running = None
        while self._running is not None:
            group, read = self._running
            found.update(zip(group, read(), strict=True))
            self._running = self._next()
        return [found.get(index, NOT_READY) for index in range(len(self._rows))]


class Layers(NamedTuple):
    """Layers that the tokens of a cycle run."""

    exit_layer: int
    num_layers: int


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launch. The branches of a row have adjacent places."""

    rows: Sequence[RowPlace]
    branches: int
    host: HostBuffer
    begins: Sequence[int]
    """Where the tokens of each place begin in the deep pass."""
    layers: Layers
    passes: int
    """Draft passes of a cycle."""
    unfinished: CycleGraph | None = None
    """A cycle with masks whose choice is not launched yet."""
    num_cycles: int = 1
    depth: LaunchDepth | None = None
    """The launch depth it was launched with; None if something else decided how many cycles it has."""
    next: InFlightStep | None = None
    """What was launched after this step before it was read."""
    _starts: list[tuple[int, int]] = field(default_factory=list)
    """Token and position that the rows had when it ran, once these are known."""
    _masked: Collection[int] = ()
    """Places whose tokens were all chosen among those that their grammar allows."""

    @property
    def drafts(self) -> int:
        """Of the row that has most."""
        return self.rows[0].drafts

    def find(self, rows: Sequence[RowStep]) -> dict[int, int]:
        """Index of each row in the launch, for rows that it runs as they are now: with the token and at the position
        that the device had."""
        mine, starts = self.rows, self._starts
        numbers = {id(place.step.table): number for number, place in enumerate(mine)}
        found: dict[int, int] = {}
        for index, row in enumerate(rows):
            table, token_ids = row.table, row.token_ids
            number = numbers.get(id(table))
            if number is None or len(token_ids) != 1 or starts[number] != (token_ids[0], table.length):
                continue
            if is_unchanged(mine[number].step, mine[number].blocks, row):
                found[index] = number
        return found

    def learn_starts(self, previous: CycleOutput) -> None:
        """Where the rows started, from the output of the last cycle before."""
        tokens, positions = previous.next_state
        self._starts = [
            (step.token_ids[0], step.table.length) if place < 0 else (tokens[place], positions[place])
            for step, _, _, place in self.rows
        ]

    def finish(self, found: Mapping[int, int], rows: Sequence[RowStep]) -> None:
        """Launch the choice of a cycle with masks, for the rows that `find` returned."""
        graph, self.unfinished = self.unfinished, None
        if graph is not None:
            masked = [(number, rows[index]) for index, number in found.items() if needs_mask(rows[index])]
            masked.sort(key=_mask_order)
            self._masked = graph.choose(self.host, self.rows, self.begins, dict(masked))

    def results(self, wanted: Mapping[int, int], rows: Sequence[RowStep]) -> list[RowResult]:
        """Wait for the device. Results of the rows that `find` returned, in the order of `wanted`."""
        outputs = self.host.read()
        if self.next is not None:
            self.next.learn_starts(outputs[-1])
        num_tokens = self.begins[-1] + self.rows[-1].drafts + 1
        finite = all([output.is_finite(len(self.begins), num_tokens) for output in outputs])
        by_place = [self._by_place(output) for output in outputs]
        most_gained = self.num_cycles * (self.drafts + 1)
        results = []
        for index, number in wanted.items():
            step = rows[index]
            params = step.request.params
            near_end = end_of(step.request) - step.table.length - 1 < most_gained
            if near_end or not finite or params.threshold is not None:
                result = self._any_result(step, number, outputs, by_place)
            else:
                result = self._usual_result(step, number, outputs, by_place)
            if params.logprobs is not None or step.policy.budget is not None:
                notes = self._notes(step, number, outputs)[: len(result.token_ids)]
                if any([note is not NO_NOTE for note in notes]):
                    result = result._replace(notes=tuple(notes))
            if step.request.mask is not None and result.token_ids and checks_tokens(step):
                likeliest = functools.partial(self._likeliest, step, number, outputs)
                if number in self._masked:
                    observe_masked(step, result, likeliest)
                else:
                    result = obeyed(step, result, likeliest, self.layers.num_layers)
            results.append(result)
        return results

    def _likeliest(self, step: RowStep, number: int, outputs: Sequence[CycleOutput], index: int) -> Likeliest:
        """The likeliest tokens and their log-probabilities where a row chose one of its tokens, counted from the first
        of this launch."""
        start, wanted = step.table.length, step.table.length + index
        for output in outputs:
            place = self._place(number, output)
            if wanted < (position := output.next_state[1][place]):
                assert output.top is not None
                at = self.begins[place] + wanted - start
                return output.top.ids[at], output.top.logprobs[at]
            start = position
        raise AssertionError("a token of this launch")

    def _notes(self, step: RowStep, number: int, outputs: Sequence[CycleOutput]) -> list[TokenNote]:
        """Log-probabilities of the tokens of a row, and gaps of those that its budget kept."""
        num_logprobs, start, notes = step.request.params.logprobs, step.table.length, list[TokenNote]()
        for output in outputs:
            place = self._place(number, output)
            position, begin = output.next_state[1][place], self.begins[place]
            end = begin + position - start
            if num_logprobs is None:
                mine = [NO_NOTE] * (end - begin)
            else:
                assert output.top is not None
                mine = output.top.notes(begin, end, num_logprobs)
            if step.policy.budget is not None:
                for index, gap in enumerate(output.gaps[begin:end].tolist()):
                    if gap >= 0.0:
                        mine[index] = mine[index]._replace(audit=Audit.DISAGREED, gap=gap)
            notes += mine
            start = position
        return notes

    def _usual_result(
        self, step: RowStep, number: int, outputs: Sequence[CycleOutput], by_place: Sequence[ByPlace]
    ) -> RowResult:
        """Where all drafts count: `_any_result` without a loop over tokens."""
        drafts, start, from_suffix = self.rows[number].drafts, step.table.length, bool(self.rows[number].suffix_drafts)
        token_ids: tuple[int, ...] = ()
        scores: tuple[float | None, ...] = ()
        gains: tuple[int, ...] = ()
        for output, drafted in zip(outputs, by_place, strict=True):
            place = self._place(number, output)
            position, begin = output.next_state[1][place], self.begins[place]
            gained, start = position - start, position
            token_ids += output.following[begin : begin + gained]
            if from_suffix:
                scores += NO_SCORE * gained
            elif drafts:
                mine = drafted[place][0]
                scores += mine[:gained] if gained <= drafts else (*mine[:drafts], None)
            else:
                scores += NO_SCORE
            gains += (gained,)
        exit_layers, layers_run, counts = self._outcome(drafts, gains, from_suffix=from_suffix)
        return RowResult(token_ids, exit_layers, scores, len(token_ids), layers_run, counts)

    def _any_result(
        self, step: RowStep, number: int, outputs: Sequence[CycleOutput], by_place: Sequence[ByPlace]
    ) -> RowResult:
        """Token by token: thresholds, drafts that would be the last token, and numbers that are not finite."""
        drafts, start, end = self.rows[number].drafts, step.table.length, end_of(step.request)
        from_suffix = bool(self.rows[number].suffix_drafts)
        exit_layer = FROM_TEXT if from_suffix else self.layers.exit_layer
        min_score = cycle_min_score(step.request)
        tokens: list[TokenResult] = []
        passes: list[DraftCounts] = []
        layers_run, error = 0, None
        for output, drafted in zip(outputs, by_place, strict=True):
            place = self._place(number, output)
            scores = drafted[place][0] if drafts and not from_suffix else (0.0,) * drafts
            begin, position = self.begins[place], output.next_state[1][place]
            allowed = max(0, min(drafts, end - start - 2))  # as `counting` of the cycle's plan
            accepted, start = position - start - 1, position
            counted = _num_counted(scores[:allowed], min_score)
            is_fault = counted < allowed and not isfinite(scores[counted])
            layers_run += self._outcome(drafts, (1,), from_suffix=from_suffix)[1]
            for distance in range(accepted + 1):
                best = output.best[begin + distance]
                if not isfinite(best):
                    error = f"numerical_error: the largest logit of the row is {best}"
                    accepted = distance
                    break
                score = scores[distance] if distance < allowed and not from_suffix else None
                layer = exit_layer if distance < accepted else self.layers.num_layers
                tokens.append(TokenResult(output.following[begin + distance], layer, score=score))
            passes.append(DraftCounts(counted, accepted, int(is_fault), allowed, from_suffix))
            if error is not None:
                break
        if tokens:  # after an error the text may end with these; if not, the next step fails too
            error = None
        return RowResult.of(tokens, max(len(tokens), 1), layers_run, tuple(passes), error)

    def _outcome(
        self, drafts: int, gains: tuple[int, ...], *, from_suffix: bool
    ) -> tuple[tuple[int, ...], int, tuple[DraftCounts, ...]]:
        return _outcome(self.layers, drafts, min(drafts, self.passes), self.branches, gains, from_suffix)

    def _place(self, number: int, output: CycleOutput) -> int:
        """The place of a row: with branches, of the one whose first draft follows, or else the first."""
        place = number * self.branches
        if self.branches == 1:
            return place
        return place + branch_of(output.following[self.begins[place]], output.drafted[0][place : place + self.branches])

    def _by_place(self, output: CycleOutput) -> ByPlace:
        if not self.drafts:
            return []
        return list(zip(zip(*output.scores, strict=True), zip(*output.drafted, strict=True), strict=True))


def _mask_order(placed: tuple[int, RowStep]) -> tuple[bool, float]:
    """Rows that cannot do without come first, then those with most tokens that do not fit."""
    mask = placed[1].request.mask
    return not must_have_mask(placed[1]), 0.0 if mask is None else -mask.misfits


def is_unchanged(launched: RowStep, blocks: list[int], row: RowStep) -> bool:
    """Whether a row is the one that was launched, and its blocks begin with those that it had."""
    return launched.request is row.request and row.table.block_ids[: len(blocks)] == blocks


def branch_of(token_id: int, tried: Sequence[int]) -> int:
    """The first branch that tried this token, or else the first of all."""
    return tried.index(token_id) if token_id in tried else 0


@functools.cache
def _outcome(
    layers: Layers, drafts: int, passes: int, branches: int, gains: tuple[int, ...], from_suffix: bool
) -> tuple[tuple[int, ...], int, tuple[DraftCounts, ...]]:
    """Exit layers, layers run and draft counts of a row that gains so many tokens in each cycle, all drafts counting.
    The same few for all rows and steps."""
    exit_layer = FROM_TEXT if from_suffix else layers.exit_layer
    exit_layers = chain(*[(*[exit_layer] * (gained - 1), layers.num_layers) for gained in gains])
    layers_run = branches * (passes * layers.exit_layer + (drafts + 1) * layers.num_layers) * len(gains)
    counts = tuple([DraftCounts(drafts, more - 1, 0, drafts, from_suffix) for more in gains])
    return tuple(exit_layers), layers_run, counts


def _num_counted(scores: Sequence[float], min_score: float) -> int:
    for number, score in enumerate(scores):
        if not counts(score, min_score):
            return number
    return len(scores)
