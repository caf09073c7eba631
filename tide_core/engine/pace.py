"""How many cycles are launched at a time: one, unless the host is slower than the device.

Whatever a cycle gives a row, the host has something to do for it: commit it, say it, schedule it again. With many rows
of a small model this takes longer than the device needs for a cycle, and the device would wait for the next one. Then
several are launched one behind another, the legs of one flight, and read together: most of what the host does is done
once for all of them.

Texts then come in larger pieces, and rows that are new or have ended wait for the end of a flight. So there are no more
legs than it takes to keep the device busy. That it would wait is seen: the host has not waited for it. That fewer legs
would do is seen where the host waits for a whole leg; where it waits for less it is tried now and then, less and less
often as long as they do not. Whoever begins anew begins with one.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_LEGS = 4
PATIENCE = 6
"""Flights that must agree before there are more: hosts are disturbed now and then."""
NO_TIME = 0.03
"""Of the time between two flights: whoever waits no longer than that has not waited."""
TRY_AFTER, TRY_AFTER_MOST = 24, 384
"""Flights before one leg less is tried."""


@dataclass(slots=True)
class Pace:
    """Legs of the next flight."""

    legs: int = 1
    _hurried: int = 0
    """Flights in a row that the host has not waited for."""
    _idle: int = 0
    """Flights in a row that it has waited for so long that one leg less would do."""
    _shorter: int = 0
    """Flights in a row that had no room for all the legs."""
    _flights: int = 0
    """Since the last change."""
    _try_after: int = TRY_AFTER
    _is_trying: bool = False

    def begin(self) -> None:
        """Nothing is on its way: what was seen before says nothing about what comes."""
        self._try_after = TRY_AFTER
        self._become(1)

    def note(self, legs: int, waited_s: float, took_s: float) -> None:
        """The host has waited so long for a flight of so many legs, of the time since it had read the one before."""
        self._shorter = self._shorter + 1 if legs < self.legs else 0
        if self._shorter >= PATIENCE:
            return self._become(legs)
        if legs != self.legs:
            return None  # begun before the last change
        self._flights += 1
        self._hurried = self._hurried + 1 if waited_s < NO_TIME * took_s else 0
        self._idle = self._idle + 1 if waited_s > took_s / legs else 0
        if self._hurried >= PATIENCE:
            if legs < MOST_LEGS:
                self._try_after = min(2 * self._try_after, TRY_AFTER_MOST) if self._is_trying else TRY_AFTER
                self._become(legs + 1)
        elif legs > 1 and self._idle >= PATIENCE:
            self._become(legs - 1)
        elif self._is_trying and self._flights > 2 * PATIENCE:  # fewer will do
            self._is_trying, self._try_after = False, TRY_AFTER
        elif legs > 1 and self._flights >= self._try_after:
            self._become(legs - 1, is_trying=True)
        return None

    def _become(self, legs: int, is_trying: bool = False) -> None:
        self.legs, self._is_trying = legs, is_trying
        self._hurried = self._idle = self._shorter = self._flights = 0
