"""The channel of a client, replaced where it leads to a server that takes no more calls.

HAProxy, when it is reloaded, says to every connection of its old process that it takes no more calls (GOAWAY). To one
that was just opened it says so together with its first frame; gRPC then counts the connection as usable for as long as
it is open, which is minutes, and fails every call on it. With gRPC's own retries such a call is started again without a
pause until its deadline and takes a hundred megabytes a second (grpcio 1.85). So those are off, and a call that was
turned away twice gets another channel.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tide.v1 import tide_pb2_grpc
from tide_client.tls import Tls, open_channel

REOPEN_PAUSE_S = 1.0
"""Calls of several threads that fail together open one channel between them."""


class Connection:
    """The channel that calls start on."""

    def __init__(self, module: Any, address: str, tls: Tls | None, given: Any = None) -> None:
        """`module`: grpc or grpc.aio. `given`: a channel that the caller made; it is not replaced."""
        self._module, self._address, self._tls = module, address, tls
        self._is_given = given is not None
        self._lock = threading.Lock()
        self._opened_at = time.monotonic()
        self.channels: list[Any] = [given if self._is_given else open_channel(module, address, tls)]
        """The last one is in use; calls may still run on the others."""
        self.stub: Any = tide_pb2_grpc.TideServiceStub(self.channels[-1])

    def replace(self) -> None:
        """Later calls start on a new channel."""
        with self._lock:
            if self._is_given or time.monotonic() - self._opened_at < REOPEN_PAUSE_S:
                return
            self._opened_at = time.monotonic()
            self.channels.append(open_channel(self._module, self._address, self._tls))
            self.stub = tide_pb2_grpc.TideServiceStub(self.channels[-1])
