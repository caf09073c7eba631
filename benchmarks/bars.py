"""What a benchmark must reach."""

from __future__ import annotations

from dataclasses import dataclass


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
