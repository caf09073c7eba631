"""Who did how much of a calibration. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """What one of several workers did."""

    name: str
    node: str
    num_items: int
    """Shards, prompts and stages."""
    busy_s: float
    num_restarts: int


def together(before: Sequence[WorkerTime], now: Sequence[WorkerTime]) -> list[WorkerTime]:
    """What crews of one run have done one after the other: places of one name on one node are one place."""
    added = {(each.name, each.node): each for each in before if each.num_items or each.num_restarts}
    for each in now:
        old = added.get((each.name, each.node), WorkerTime(each.name, each.node, 0, 0.0, 0))
        added[each.name, each.node] = replace(
            each,
            num_items=old.num_items + each.num_items,
            busy_s=old.busy_s + each.busy_s,
            num_restarts=old.num_restarts + each.num_restarts,
        )
    return list(added.values())
