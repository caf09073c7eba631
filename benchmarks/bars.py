"""What a benchmark must reach."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One promise: what was measured, and what it must reach."""

    name: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Part:
    """What one part of a benchmark has measured."""

    name: str
    title: str
    data: Any
    bars: list[Bar] = field(default_factory=list)


def conclude(conditions: Mapping[str, Any], found: Sequence[Part], say: Callable[[str], None], *, as_json: bool) -> int:
    """Say which bars hold, print all as one JSON object if asked to; the exit code."""
    bars = [bar for part in found for bar in part.bars]
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        say(f"  {'ok  ' if bar.holds else 'MISS'} {bar.name}: {bar.value:.4g} ({sign} {bar.limit:g})")
    if as_json:
        report = {"conditions": conditions, "parts": {part.name: part.data for part in found}}
        print(json.dumps({**report, "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars]}, indent=1))
    return 0 if all(bar.holds for bar in bars) else 1
