"""The next cycle of rows that go on, begun before anybody has asked for it.

Once a cycle is read, its results tell what the next one of the same rows will be, unless a row ends or the plan
changes. So it can begin at once, and what the host still has to do about the results is done while the device works.
If the next step turns out to be another one, what was begun is for nothing and harms nobody: it writes behind the valid
lengths of its rows, in blocks that no other row has read from, and whatever is launched next waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tide_core.batch import RowResult, RowStep
from tide_core.kv.block_manager import BlockTable
from tide_core.quick import quick

make_step = quick(RowStep)
Begun = TypeVar("Begun")


@dataclass(frozen=True, slots=True)
class Ahead(Generic[Begun]):
    """Steps that were foreseen, and what was begun for them."""

    steps: Sequence[RowStep]
    begun: Begun

    def foresaw(self, steps: Sequence[RowStep]) -> bool:
        return len(steps) == len(self.steps) and all(map(_is_same, steps, self.steps))


def next_steps(steps: Sequence[RowStep], results: Sequence[RowResult], block_size: int) -> list[RowStep] | None:
    """What follows these, if every row goes on as it did: as greedily, with as many drafts, in the blocks it has."""
    found = []
    for step, result in zip(steps, results, strict=True):
        request, count = step.request, step.num_drafts
        tokens = [token.token_id for token in result.tokens]
        left = request.params.max_tokens - len(step.output_ids) - len(tokens)
        if result.error is not None or left <= count or request.params.stop or not request.params.is_greedy:
            return None
        start = step.start + result.num_valid
        used = (start + count) // block_size + 1
        blocks = step.table.block_ids[:used]
        if len(blocks) < used or not {*request.end_ids}.isdisjoint(tokens):
            return None
        table = BlockTable([start], blocks)
        found.append(make_step(request, table, tokens[-1:], step.output_ids, True, step.policy, count))
    return found


def _is_same(step: RowStep, foreseen: RowStep) -> bool:
    blocks = foreseen.table.block_ids
    return (
        step.request is foreseen.request
        and step.policy is foreseen.policy
        and step.num_drafts == foreseen.num_drafts
        and step.token_ids[0] == foreseen.token_ids[0]
        and step.start == foreseen.start
        and step.table.block_ids[: len(blocks)] == blocks
    )
