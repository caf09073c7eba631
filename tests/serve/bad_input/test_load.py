"""More than there is room for: streams, connections, requests, and frames that ask for nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.common.live import Server
from tests.serve.bad_input.requests import AUTH, BODY, METADATA, becomes_idle, generate, sampled, send
from tests.serve.load import until
from tests.serve.tiny import KEY
from tide_client import TideClient

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]


def test_31_more_streams_than_one_connection_carries_wait_their_turn(server: Server, stub: Any) -> None:
    futures = [stub.Generate.future(generate(), metadata=METADATA, timeout=60) for _ in range(150)]
    assert len({future.result().text for future in futures}) == 1


def test_68_idle_connections_do_not_keep_others_out(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.http_port), timeout=60) for _ in range(500)]
    try:
        assert until(server.is_healthy)
        assert server.post(BODY, headers=AUTH)[0] == 200
    finally:
        for each in idle:
            each.close()


def test_two_models_in_one_cluster_each_answer_for_themselves(server: Server) -> None:
    with TideClient(server.address, application="full") as client:
        assert client.model_info().model == "full"
        assert client.model_info().modes == ("full",)
    assert server.ask("GET", "/full/v1/models")[1]["data"][0]["id"] == "full"
    assert server.ask("GET", "/v1/models", headers=AUTH)[1]["data"][0]["id"] == "tiny"


def test_a_full_queue_says_when_to_come_again(server: Server, stub: Any, hold: Path) -> None:
    """One request runs and two wait."""
    hold.unlink()

    def counts() -> tuple[int, int]:
        stats = server.ask("GET", "/full/exit_stats")[1]
        return stats["num_running"], stats["num_waiting"]

    calls = []
    for num_waiting in range(3):
        message = sampled(max_tokens=200, ignore_eos=True)
        calls.append(stub.GenerateStream(message, metadata=[("application", "full")]))
        assert until(lambda: counts() == (1, num_waiting))  # noqa: B023
        hold.touch()  # from the first token on, so that none of them ends
    raw = json.dumps({"prompt": "the cat", "max_tokens": 2}).encode()
    status, headers, body = send(server, "POST", "/full/v1/completions", raw)
    assert status == 429
    assert json.loads(body)["error"]["code"] == "engine_busy"
    assert headers["Retry-After"]
    hold.unlink()
    for call in calls:
        call.cancel()
    assert until(lambda: counts() == (0, 0))
    assert send(server, "POST", "/full/v1/completions", raw)[0] == 200


NUM_AT_ONCE = 200
"""Over each of HTTP and gRPC."""


@pytest.fixture
def hold(server: Server) -> Iterator[Path]:
    """While this file exists, the engine of the other model takes no step."""
    [path] = [
        Path(app["runtime_env"]["env_vars"]["TIDE_TEST_HOLD_FILE"])
        for app in server.config["applications"]
        if app["name"] == "full"
    ]
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_hundreds_at_once_are_refused_while_those_that_were_let_in_are_held(
    server: Server, stub: Any, hold: Path
) -> None:
    """No refusal waits for a request to end: none can end before the file is gone."""

    def num_open() -> int:
        stats = server.ask("GET", "/full/exit_stats")[1]
        return int(stats["num_running"] + stats["num_waiting"])

    full = [("application", "full")]
    let_in = [stub.GenerateStream(sampled(max_tokens=2), metadata=full) for _ in range(3)]
    assert until(lambda: num_open() == 3)
    over_grpc = [stub.Generate.future(sampled(max_tokens=2), metadata=full, timeout=60) for _ in range(NUM_AT_ONCE)]
    body = json.dumps({"prompt": "the cat", "max_tokens": 2})
    with contextlib.ExitStack() as opened:
        connections = [
            http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60) for _ in range(NUM_AT_ONCE)
        ]
        for connection in connections:
            opened.callback(connection.close)
        for connection in connections:
            connection.request("POST", "/full/v1/completions", body, {"Content-Type": "application/json"})
        replies = [connection.getresponse() for connection in connections]
        refused = [(reply.status, reply.headers["Retry-After"], json.loads(reply.read())) for reply in replies]
    assert {(status, wait, answer["error"]["code"]) for status, wait, answer in refused} == {(429, "1", "engine_busy")}
    assert {future.code() for future in over_grpc} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert num_open() == 3
    hold.unlink()
    assert all([*call][-1].HasField("final") for call in let_in)


HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
END_HEADERS = 4
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(fields: list[tuple[str, str]]) -> bytes:
    """Literals without an index, as plain as HPACK has them."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields
    )


@contextlib.contextmanager
def http2(server: Server) -> Iterator[socket.socket]:
    """A connection on which nobody waits for answers: what comes is read and dropped."""
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=60) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        threading.Thread(target=_drain, args=(raw,), daemon=True).start()
        yield raw


def _drain(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while raw.recv(2**16):
            pass


def flood(raw: socket.socket, pieces: Iterator[bytes]) -> None:
    """Send until all is sent or the other side has had enough."""
    with contextlib.suppress(ConnectionError):
        while block := b"".join(itertools.islice(pieces, 100)):
            raw.sendall(block)


def test_30_streams_that_are_opened_and_reset_in_the_thousands_do_not_keep_others_out(server: Server) -> None:
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tide.v1.TideService/GenerateStream"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *METADATA,
    ]
    opening = header_block(fields)
    resets = (
        frame(HEADERS, END_HEADERS, stream, opening) + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
        for stream in range(1, 20_001, 2)
    )
    with http2(server) as raw, TideClient(server.address, api_key=KEY, application="tiny") as other:
        flooding = threading.Thread(target=flood, args=(raw, resets))
        flooding.start()
        answers = [other.generate("the cat", max_tokens=4).text for _ in range(5)]
        flooding.join(60)
        assert not flooding.is_alive()
    assert len(set(answers)) == 1
    assert becomes_idle(server)


def test_32_pings_in_the_thousands_do_not_keep_others_out(server: Server) -> None:
    pings = (frame(PING, 0, 0, struct.pack(">Q", index)) for index in range(50_000))
    with http2(server) as raw, TideClient(server.address, api_key=KEY, application="tiny") as other:
        flooding = threading.Thread(target=flood, args=(raw, pings))
        flooding.start()
        answers = [other.generate("the cat", max_tokens=4).text for _ in range(5)]
        flooding.join(60)
        assert not flooding.is_alive()
    assert len(set(answers)) == 1
