"""A server that is being reloaded: the connection is open, and it takes no calls."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.conftest import Outcome
from tests.client.scripted import TEXT, GrpcServer, Script
from tests.client.test_silence import Cable
from tide_client import StatusError

SETTINGS, GOAWAY = 4, 7
LAST_STREAM = 2**31 - 1
MAX_GROWTH_KIB = 200 * 1024
"""gRPC's own retries take that in two seconds."""


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


class Reloaded(Cable):
    """Leads to the server, but for the first connections: these are told at once to go away, and stay open."""

    def __init__(self, address: str, turns_away: int) -> None:
        self.num_connections, self._turns_away = 0, turns_away
        super().__init__(address)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._sockets.append(client)
                self.num_connections += 1
                if self.num_connections <= self._turns_away:
                    client.sendall(frame(SETTINGS) + frame(GOAWAY, struct.pack(">II", LAST_STREAM, 0)))
                    continue
                server = socket.create_connection(self._server)
                self._sockets.append(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(*pair, self._cut), daemon=True).start()


@pytest.fixture
def reloaded(server: GrpcServer) -> Iterator[Callable[[int], Reloaded]]:
    made: list[Reloaded] = []

    def reload(turns_away: int) -> Reloaded:
        made.append(Reloaded(server.address, turns_away))
        return made[-1]

    yield reload
    for each in made:
        each.close()


@pytest.mark.parametrize("retries", [0, 3])
def test_a_stream_that_no_server_began_with_is_asked_for_again_on_another_connection(
    reloaded: Callable[[int], Reloaded], script: Script, read: Callable[..., Outcome], retries: int
) -> None:
    seen = read(reloaded(1).address, retries=retries, timeout_s=60)
    assert (seen.text, seen.error) == (TEXT, None)
    assert len(script.requests) == 1, "no server saw an attempt before it"


def test_so_is_a_call(reloaded: Callable[[int], Reloaded], call: Callable[..., Any]) -> None:
    cable = reloaded(1)
    assert call(cable.address, "model_info").model == "scripted"
    assert cable.num_connections == 2


def test_a_server_that_turns_everybody_away_ends_a_call_soon_and_takes_no_memory(
    reloaded: Callable[[int], Reloaded], script: Script, read: Callable[..., Outcome]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = read(reloaded(1000).address, retries=0, timeout_s=600)
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, seen.error.was_turned_away, len(script.requests)) == ("UNAVAILABLE", True, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
