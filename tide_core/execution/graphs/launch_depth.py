"""How many cycles are launched at a time: one, unless the host is slower than the device.

Whatever a cycle gives a row, the host has something to do for it: commit it, say it, schedule it again. With many rows
of a small model this takes longer than the device needs for a cycle, and the device would wait for the next one. Then
several are launched one behind another, the legs of one flight, and read together: most of what the host does is done
once for all of them.

Texts then come in larger pieces, and rows that are new or have ended wait for the end of a flight: each leg more costs
about a cycle and a half of every answer. So there are more only where the device loses more than that: of the time from
one flight to the next, what is left when it has run, by its own clock. That fewer legs would do is seen where the host
waits for a whole leg; where it waits for less, or that was wrong, it is tried now and then, less and less often as long
as they do not: not all that a device loses is the host's fault.

What is right for many rows is not for few, and for rows that draft it is not what it is for others: each has a pace of
its own, which is remembered until there are such rows again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_LEGS = 4
MOST_LOSS, MUCH_LOSS = 0.08, 0.2
"""Shares of its time: what the device may lose for long before there is a leg more, and what is too much at once."""
MEMORY = 32
"""Flights over which losses are smoothed."""
WORST_LOSS = 0.3
"""That one flight counts for: hosts are disturbed now and then."""
PATIENCE = 4
"""Flights in a row that say that there are too many legs; twice as many before anything else is judged, and six times
as many where it can wait."""
TRY_AFTER, TRY_AFTER_MOST = 32, 512
"""Flights before one leg less is tried."""


@dataclass(slots=True)
class Pace:
    """Legs of the next flight."""

    legs: int = 1
    _loss: float = 0.0
    _idle: int = 0
    """Flights in a row that the host has waited for so long that one leg less would do."""
    _shorter: int = 0
    """Flights in a row that had no room for all the legs."""
    _flights: int = 0
    """Since the last change."""
    _try_after: int = TRY_AFTER
    _is_trying: bool = False

    def begin(self) -> None:
        """What is seen from now on follows nothing that was seen before."""
        self._try_after = TRY_AFTER
        self._become(self.legs)

    def note(self, legs: int, ran_s: float, waited_s: float, took_s: float) -> None:
        """The device has run so long for a flight of so many legs, and the host has waited so long for it, of the time
        since it had read the one before."""
        self._shorter = self._shorter + 1 if legs < self.legs else 0
        if self._shorter >= PATIENCE:
            return self._become(legs)
        if legs != self.legs:
            return None  # begun before the last change
        self._flights += 1
        loss = min(max(1.0 - ran_s / took_s, 0.0), WORST_LOSS)
        self._loss += (loss - self._loss) / min(self._flights, MEMORY)
        self._idle = self._idle + 1 if waited_s > took_s / legs else 0
        is_urgent = self._loss > MUCH_LOSS
        patience = 2 * PATIENCE if is_urgent or self._is_trying else 6 * PATIENCE
        if legs < MOST_LEGS and self._loss > MOST_LOSS and self._flights > patience:
            if self._is_trying:
                self._try_after = min(2 * self._try_after, TRY_AFTER_MOST)
            self._become(min(2 * legs if is_urgent else legs + 1, MOST_LEGS))
        elif legs > 1 and self._idle >= PATIENCE and self._try_after == TRY_AFTER:
            self._become(legs - 1, is_trying=True)
        elif self._is_trying and self._flights > MEMORY:  # fewer will do
            self._is_trying, self._try_after = False, TRY_AFTER
        elif legs > 1 and self._flights >= self._try_after:
            self._become(legs - 1, is_trying=True)
        return None

    def _become(self, legs: int, is_trying: bool = False) -> None:
        self.legs, self._is_trying = legs, is_trying
        self._idle = self._shorter = self._flights = 0
        self._loss = 0.0


class Paces:
    """By how many rows there are, about, and whether they draft."""

    def __init__(self, make: Callable[[], Pace] = Pace) -> None:
        self._make = make
        self._paces: dict[tuple[int, bool], Pace] = {}

    def of(self, num_rows: int, draft: bool) -> Pace:
        situation = (num_rows - 1).bit_length(), draft
        if situation not in self._paces:
            self._paces[situation] = self._make()
        return self._paces[situation]
