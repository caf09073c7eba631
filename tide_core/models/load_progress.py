"""How much of the weights has been read: for whoever shows it, and now and then for the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("tide")

LOG_EVERY_S = 10.0
Listener = Callable[[int, int], None]
"""Gets bytes read and bytes in all."""
_listener: ContextVar[Listener | None] = ContextVar("load_listener", default=None)


@contextmanager
def notifying(listener: Listener) -> Iterator[None]:
    """Loads within the block report to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class LoadProgress:
    """Of one load."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._read = name, total, 0
        self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._read += num_bytes
        if (listener := _listener.get()) is not None:
            listener(self._read, self._total)
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.info("loading %s: %.1f of %.1f GB", self._name, self._read / 1e9, self._total / 1e9)
