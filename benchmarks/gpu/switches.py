"""Switches that take one mechanism out of an engine. This is the only file of the ablation that uses engine internals.

A switch is a function of an engine's parts. It returns a context manager in which the mechanism is off, or None where
the engine does not have it. The engine is idle when a switch is entered and left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from tide_core.engine.assemble import Parts
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.execution.graphs.launch_depth import LaunchDepth, LaunchDepths

Switch = Callable[[Parts], AbstractContextManager[Any] | None]


class _OneStepPerLaunch(LaunchDepth):
    def observe(self, *seen: Any) -> None:
        """Keeps one step per launch."""


def no_change(parts: Parts) -> AbstractContextManager[Any]:
    """The base again: how far a ratio is from 1 by chance."""
    return contextlib.nullcontext()


def launch_depth(parts: Parts) -> AbstractContextManager[Any] | None:
    """One step per launch, always."""
    cycles = parts.runner.cycles
    return None if cycles is None else mock.patch.object(cycles, "depths", LaunchDepths(_OneStepPerLaunch))


def prefill_ahead(parts: Parts) -> AbstractContextManager[Any] | None:
    """A prompt runs only when its row has a slot."""
    scheduler = parts.core.scheduler
    return mock.patch.object(scheduler, "prefills_ahead", False) if scheduler.prefills_ahead else None


def branches(parts: Parts) -> AbstractContextManager[Any] | None:
    """A row that runs nearly alone drafts one sequence only."""
    cycles = parts.runner.cycles
    if cycles is None or cycles._branches is None:
        return None
    return mock.patch.object(cycles, "_branches", None)


def fast_results(parts: Parts) -> AbstractContextManager[Any] | None:
    """The results of every row are made token by token."""
    if parts.runner.cycles is None:
        return None
    return mock.patch.object(InFlightStep, "_usual_result", InFlightStep._any_result)


SWITCHES: dict[str, Switch] = {
    "no_change": no_change,
    "launch_depth": launch_depth,
    "prefill_ahead": prefill_ahead,
    "branches": branches,
    "fast_results": fast_results,
}
