"""Switches that take one mechanism out of an engine. This is the only file of the ablation that uses engine internals.

A switch is a function of an engine's parts. It returns a context manager in which the mechanism is off, or None where
the engine does not have it. The engine is idle when a switch is entered and left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from tide_core.engine.assemble import Parts
from tide_core.execution.graphs.in_flight import Flight
from tide_core.execution.graphs.launch_depth import Pace, Paces
from tide_core.exits.accept import Settler

Switch = Callable[[Parts], AbstractContextManager[Any] | None]


class _OneStepPerLaunch(Pace):
    def note(self, *seen: Any) -> None:
        """Keeps one step per launch."""


def no_change(parts: Parts) -> AbstractContextManager[Any]:
    """The base again: how far a ratio is from 1 by chance."""
    return contextlib.nullcontext()


def launch_depth(parts: Parts) -> AbstractContextManager[Any] | None:
    """One step per launch, always."""
    cycles = parts.runner.cycles
    return None if cycles is None else mock.patch.object(cycles, "paces", Paces(_OneStepPerLaunch))


def prefill_ahead(parts: Parts) -> AbstractContextManager[Any] | None:
    """A prompt runs only when its row has a slot."""
    scheduler = parts.core.scheduler
    return mock.patch.object(scheduler, "keeps_standby", False) if scheduler.keeps_standby else None


def branches(parts: Parts) -> AbstractContextManager[Any] | None:
    """A row that runs nearly alone drafts one sequence only."""
    cycles = parts.runner.cycles
    if cycles is None or cycles._branches is None:
        return None
    return mock.patch.object(cycles, "_branches", None)


def fast_acceptance(parts: Parts) -> AbstractContextManager[Any] | None:
    """Every row is accepted by the readable rule, none by its fast twin."""
    if parts.runner.cycles is None:
        return None
    return _readable_acceptance()


@contextlib.contextmanager
def _readable_acceptance() -> Iterator[None]:
    by_rule = Settler.row

    def row(*given: Any, is_finite: bool = False, **more: Any) -> Any:
        return by_rule(*given, is_finite=False, **more)

    with mock.patch.object(Flight, "_sound_legs", return_value={}), mock.patch.object(Settler, "row", row):
        yield


SWITCHES: dict[str, Switch] = {
    "no_change": no_change,
    "launch_depth": launch_depth,
    "prefill_ahead": prefill_ahead,
    "branches": branches,
    "fast_acceptance": fast_acceptance,
}
