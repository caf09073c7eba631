"""The garbage collector of the process, as long as engines run in it.

It comes in the middle of a step, and looks through all that is new, now and then through all there is. To look through
a model's objects takes a third of a second, and to come after every 700 objects, as it does by default, takes up to a
tenth of the host's time where many rows gain tokens. So it leaves alone what the process had when the last engine
began, and comes more rarely. What it is there for, objects that hold each other, a step leaves none of.
"""

from __future__ import annotations

import gc
import threading

NEW_OBJECTS = 20_000
"""That it comes after: to look through them takes some milliseconds."""

_lock = threading.Lock()
_num_engines = 0
_before: tuple[int, int, int] = (0, 0, 0)


def hold() -> None:
    """One engine more begins. A threshold that is 0, or higher than ours, was set by somebody who knows why."""
    global _num_engines, _before
    with _lock:
        _num_engines += 1
        gc.freeze()
        if _num_engines == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < NEW_OBJECTS:
                gc.set_threshold(NEW_OBJECTS, *_before[1:])


def release() -> None:
    """One that had begun has ended; with the last one all is as it was."""
    global _num_engines
    with _lock:
        _num_engines -= 1
        if _num_engines == 0:
            gc.unfreeze()
            if gc.get_threshold()[0] == NEW_OBJECTS:
                gc.set_threshold(*_before)
