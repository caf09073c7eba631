"""Cycles that run in one go on the CPU, where the CUDA kernels' twin stands in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.twin import engine_kernels
from tide_core.batch import RowStep
from tide_core.engine import assemble
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import Launched


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[list[RowStep]]:
    """Engines made from now on run cycles in one go; the rows of each."""
    seen: list[list[RowStep]] = []
    start = GraphCycles.start

    def counted(self: GraphCycles, rows: Any, **how: Any) -> Launched:
        seen.append(list(rows))
        return start(self, rows, **how)

    monkeypatch.setattr(GraphCycles, "start", counted)
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return seen
