"""How many cycles are launched at a time: one, unless the host is slower than the device.

Whatever a cycle gives a row, the host has something to do for it: commit it, say it, schedule it again. With many rows
of a small model this takes longer than the device needs for a cycle, and the device would wait for the next one. Then
several are launched one behind another, the legs of one flight, and read together: most of what the host does is done
once for all of them.

Texts then come in larger pieces, and rows that are new or have ended wait for the end of a flight. So there are no more
legs than it takes to keep the device busy, which is seen by who waits for whom.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_LEGS = 4
PATIENCE = 6
"""Flights that must agree before anything changes: hosts are disturbed now and then."""
NO_TIME = 0.03
"""Of the time between two flights: whoever waits no longer than that has not waited."""


@dataclass(slots=True)
class Pace:
    """Legs of the next flight."""

    legs: int = 1
    _more: int = 0
    _fewer: int = 0

    def note(self, legs: int, waited_s: float, took_s: float) -> None:
        """The host has waited so long for a flight of so many legs, of the time since it had read the one before."""
        if legs != self.legs:
            return  # begun before the last change, or there was no room for more
        self._more = self._more + 1 if waited_s < NO_TIME * took_s else 0
        # With one leg less, both sides would save their share of it; the device's is no more than an equal part.
        self._fewer = self._fewer + 1 if waited_s > took_s / legs else 0
        if self._more >= PATIENCE and legs < MOST_LEGS:
            self._become(legs + 1)
        elif self._fewer >= PATIENCE and legs > 1:
            self._become(legs - 1)

    def _become(self, legs: int) -> None:
        self.legs, self._more, self._fewer = legs, 0, 0
