"""When a call is made again."""

from __future__ import annotations

import random
import time

from tide_client.errors import StatusError
from tide_client.settings import Settings

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_DOUBLINGS = 10


class Attempts:
    """What one call may still do: how often it may be made again, and until when."""

    def __init__(self, settings: Settings, timeout_s: float) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._max_retries = settings.retries
        self._num_retries = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, which all attempts share."""
        return max(0.0, self._ends_at - time.monotonic())

    def pause_s(self, failure: StatusError) -> float:
        """Seconds to wait before the call is made again: longer each time, and never the same for two clients. Raises
        `failure` where it must not be made again."""
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_retries, MAX_DOUBLINGS))
        pause_s = random.uniform(longest / 2, longest) + (failure.retry_after_s or 0.0)  # noqa: S311  # no secret
        if not failure.may_be_retried or self._num_retries == self._max_retries or pause_s >= self.left_s:
            raise failure from None
        self._num_retries += 1
        return pause_s
