"""Steps per launch: one, unless the host is slower than the device.

For every cycle the host commits, emits and schedules each row. With many rows of a small model this takes longer than
the device needs for a cycle, and the device would wait. Then several cycles are launched at once and read together: the
host does most of its work once for all of them.

Each further step per launch costs latency: texts come in larger pieces, and rows that are new or have ended wait for
the end of a launch, about a cycle and a half of every answer. So depth grows only where the device is idle for longer
than that, by its own clock. It shrinks where the host waits for a whole cycle; otherwise a smaller depth is tried now
and then, less and less often while it does not do: not all idle time is the host's fault.

Many rows and few, rows that draft and rows that do not need different depths: each situation keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_STEPS = 4
MAX_IDLE, HIGH_IDLE = 0.08, 0.2
"""Idle shares of the device's time: what is tolerated for long, and what calls for a quick change."""
MEMORY = 32
"""Launches over which idle shares are smoothed."""
IDLE_CAP = 0.3
"""Largest share that one launch counts for: hosts are disturbed now and then."""
PATIENCE = 4
"""Launches in a row that call for a smaller depth; twice as many before anything else is decided, and six times as many
where it can wait."""
TRY_AFTER, TRY_AFTER_MOST = 32, 512
"""Launches before a smaller depth is tried."""


@dataclass(slots=True)
class LaunchDepth:
    """Controls the steps of the next launch."""

    steps: int = 1
    _idle: float = 0.0
    _num_waited: int = 0
    """Launches in a row that the host waited for so long that one step less would do."""
    _num_shorter: int = 0
    """Launches in a row that had no capacity for all the steps."""
    _num_launches: int = 0
    """Since the last change."""
    _try_after: int = TRY_AFTER
    _is_trying: bool = False

    def restart(self) -> None:
        """Forget what was observed: the next launches do not follow the last ones."""
        self._try_after = TRY_AFTER
        self._set(self.steps)

    def observe(self, steps: int, device_s: float, wait_s: float, period_s: float) -> None:
        """A launch of so many steps: how long the device ran, how long the host waited, and the time since the launch
        before was read."""
        self._num_shorter = self._num_shorter + 1 if steps < self.steps else 0
        if self._num_shorter >= PATIENCE:
            return self._set(steps)
        if steps != self.steps:
            return None  # launched before the last change
        self._num_launches += 1
        idle = min(max(1.0 - device_s / period_s, 0.0), IDLE_CAP)
        self._idle += (idle - self._idle) / min(self._num_launches, MEMORY)
        self._num_waited = self._num_waited + 1 if wait_s > period_s / steps else 0
        is_urgent = self._idle > HIGH_IDLE
        patience = 2 * PATIENCE if is_urgent or self._is_trying else 6 * PATIENCE
        if steps < MAX_STEPS and self._idle > MAX_IDLE and self._num_launches > patience:
            if self._is_trying:
                self._try_after = min(2 * self._try_after, TRY_AFTER_MOST)
            self._set(min(2 * steps if is_urgent else steps + 1, MAX_STEPS))
        elif steps > 1 and self._num_waited >= PATIENCE and self._try_after == TRY_AFTER:
            self._set(steps - 1, is_trying=True)
        elif self._is_trying and self._num_launches > MEMORY:  # the smaller depth will do
            self._is_trying, self._try_after = False, TRY_AFTER
        elif steps > 1 and self._num_launches >= self._try_after:
            self._set(steps - 1, is_trying=True)
        return None

    def _set(self, steps: int, is_trying: bool = False) -> None:
        self.steps, self._is_trying = steps, is_trying
        self._num_waited = self._num_shorter = self._num_launches = 0
        self._idle = 0.0


class LaunchDepths:
    """One for each situation: rows to the next power of two, and whether they draft."""

    def __init__(self, make: Callable[[], LaunchDepth] = LaunchDepth) -> None:
        self._make = make
        self._depths: dict[tuple[int, bool], LaunchDepth] = {}

    def of(self, num_rows: int, draft: bool) -> LaunchDepth:
        situation = (num_rows - 1).bit_length(), draft
        if situation not in self._depths:
            self._depths[situation] = self._make()
        return self._depths[situation]
