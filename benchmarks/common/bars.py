"""Bars: the limits that a benchmark must meet, and how a report states them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Log = Callable[[str], None]
"""Prints one line of text."""


@dataclass(frozen=True)
class Bar:
    """A measured value and its limit."""

    name: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'ok  ' if self.holds else 'MISS'} {self.name}: {self.value:.4g} ({sign} {self.limit:g})"


@dataclass
class Part:
    """The result of one part of a benchmark: data for the report, lines of text, bars."""

    name: str
    title: str = ""
    data: Any = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def bars_as_json(bars: Iterable[Bar]) -> list[dict[str, Any]]:
    return [{**asdict(bar), "holds": bar.holds} for bar in bars]


def conclude(conditions: Mapping[str, Any], parts: Sequence[Part], log: Log, *, as_json: bool) -> int:
    """Log every bar, print the report as one JSON object if `as_json`, and return the exit code."""
    bars = [bar for part in parts for bar in part.bars]
    for bar in bars:
        log(f"  {bar.line()}")
    if as_json:
        report = {"conditions": conditions, "parts": {part.name: part.data for part in parts}}
        print(json.dumps({**report, "bars": bars_as_json(bars)}, indent=1))
    return 0 if all(bar.holds for bar in bars) else 1
