"""A server that is lost without a word: its connection is not closed, and nothing comes any more."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.client.conftest import Outcome
from tests.client.scripted import TEXT, GrpcServer, Script, hangs
from tide_client import StatusError, settings

pytestmark = pytest.mark.slow


class Cable:
    """Passes bytes on in both directions until it is cut, which neither end is told. Later connections get through."""

    def __init__(self, address: str) -> None:
        self._server = address.rpartition(":")[0] or "127.0.0.1", int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()
        self._cut = threading.Event()  # of the connections to come

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._server)
                self._sockets += ends
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._copy, args=(*pair, self._cut), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if cut.is_set():
                    return
                target.sendall(data)


@pytest.fixture
def cable(server: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    monkeypatch.setattr(settings, "PING_EVERY_MS", 500)
    monkeypatch.setattr(settings, "PING_TIMEOUT_MS", 6000)  # a busy machine answers late
    cable = Cable(server.address)
    yield cable
    cable.close()


def test_a_stream_of_a_server_that_is_lost_ends_with_a_status_long_before_its_deadline(
    cable: Cable, script: Script, read: Callable[..., Outcome]
) -> None:
    script.acts.append(hangs(after=2))
    seen = read(cable.address, timeout_s=60, on_token=lambda num: cable.cut() if num == 2 else None)
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, seen.error.num_tokens) == ("UNAVAILABLE", 2)


def test_a_server_that_is_lost_before_the_first_token_is_asked_again_on_another_connection(
    cable: Cable, script: Script, read: Callable[..., Outcome]
) -> None:
    script.acts.append(hangs(after=0))
    cutting = threading.Thread(target=lambda: (script.until_asked(), cable.cut()))
    cutting.start()
    seen = read(cable.address, timeout_s=60)
    cutting.join()
    assert seen.error is None
    assert seen.text == TEXT
