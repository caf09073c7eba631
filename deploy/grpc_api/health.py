"""The answers of `grpc.health.v1`, and how many may be watched at once.

Health needs no key, so whoever reaches the port may ask. A watch stays open for as long as its client likes; without a
limit a few hundred of them take every place that requests have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

from grpc_health.v1 import health_pb2

from deploy.failures import NotServedError, TooLargeError

SERVICE_NAMES = ("", "tide.v1.TideService")
"""Services that the health check knows; the empty name is the server."""

MAX_WATCHES = 64
MAX_WATCHES_PER_CONNECTION = 16
"""A connection is what the replica sees: behind HAProxy one of HAProxy's, which several clients may share."""
LOOK_EVERY_S = 1.0


class Health:
    """Health of one replica."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises if the replica cannot serve."""
        self._check = check
        self._watches: Counter[str] = Counter()

    def check(self, service: str) -> health_pb2.HealthCheckResponse:
        """The state of one service; raises NotServedError for an unknown name."""
        if service not in SERVICE_NAMES:
            raise NotServedError("service", service, SERVICE_NAMES[-1])
        return self._state(service)

    def list(self) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses={name: self._state(name) for name in SERVICE_NAMES})

    async def watch(
        self, service: str, connection: str, is_open: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The state of one service and every change of it, until `is_open` is false. Raises TooLargeError if too many
        are open."""
        for where, num, most in (
            ("of this connection", self._watches[connection], MAX_WATCHES_PER_CONNECTION),
            ("of this replica", self._watches.total(), MAX_WATCHES),
        ):
            if num >= most:
                raise TooLargeError(f"health watches {where}", num + 1, f"at most {most}")
        self._watches[connection] += 1
        try:
            last = None
            while is_open():
                now = self._state(service)
                if now != last:
                    yield now
                    last = now
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._watches[connection] -= 1
            self._watches += Counter()  # forget connections without a watch

    def _state(self, service: str) -> health_pb2.HealthCheckResponse:
        states: Any = health_pb2.HealthCheckResponse
        if service not in SERVICE_NAMES:
            return states(status=states.SERVICE_UNKNOWN)
        try:
            self._check()
        except Exception:
            return states(status=states.NOT_SERVING)
        return states(status=states.SERVING)
