"""An HTTP server on loopback that answers as it is told, in the shape of TIDE Serve."""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.client.scripted import NUM_LAYERS

TOKENS = (
    {"id": 5, "text": "The", "exit_layer": 4, "score": None, "audit": "verified", "mode": "bounded"},
    {"id": 6, "text": " cat", "exit_layer": 1, "score": 0.75, "audit": "agreed", "mode": "bounded"},
    {"id": 7, "text": " sat", "exit_layer": 1, "score": 0.5, "audit": "disagreed", "gap": 0.125, "mode": "bounded"},
    {"id": 8, "text": ".", "exit_layer": 4, "score": None, "audit": "verified", "mode": "bounded"},
)
SUMMARY = {
    "mode": "bounded",
    "artefact": "d" * 64,
    "layers_per_token": 2.5,
    "tokens_per_deep_pass": 2.0,
    "drafts": 3,
    "accepted": 2,
    "differing": 1,
    "tokens_per_layer": {"1": 2, "4": 2},
    "queue_s": 0.5,
    "first_token_s": 1.0,
    "total_s": 2.0,
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
DONE = b"data: [DONE]\n\n"


def event(*tokens: Any, finish_reason: str | None = None, **tide: Any) -> bytes:
    choice = {"index": 0, "text": "".join(token["text"] for token in tokens), "finish_reason": finish_reason}
    return _sse({"choices": [choice], "usage": None, "tide": {"tokens": tokens, **tide}})


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-1", "model": "scripted", **value}).encode() + b"\n\n"


WHOLE = (
    event(TOKENS[0]),
    b": still here\n\n",
    event(*TOKENS[1:3]),
    event(TOKENS[3], finish_reason="stop", **SUMMARY),
    _sse({"choices": [], "usage": USAGE}),
    DONE,
)
ERROR = b'data: {"error": {"message": "scripted failure"}}\n\n'


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go when they like."""


class HttpServer:
    """`answer` is what each POST gets: a status with a body, or pieces of a stream."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.refuses: tuple[int, bytes] | None = None
        self.models: bytes = json.dumps({"data": [{"id": "scripted", "tide": {"num_layers": NUM_LAYERS}}]}).encode()
        self.pieces: tuple[bytes, ...] = WHOLE
        self.cuts = False
        """Break the connection behind the pieces, in place of ending the reply."""
        self.hangs = False
        self.released = threading.Event()
        self.gone: queue.Queue[str] = queue.Queue()
        self._server = _Quiet(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])
                self._send(200, server.models)

            def do_POST(self) -> None:
                server.paths.append(self.path)
                server.keys.append(self.headers["Authorization"])
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if server.refuses is not None:
                    self._send(*server.refuses)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in server.pieces:
                    self._chunk(piece)
                if server.hangs:
                    self._wait()
                self.close_connection = server.cuts
                if not server.cuts:
                    self._chunk(b"")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _wait(self) -> None:
                """Until the client goes, or the test ends."""
                self.connection.settimeout(0.05)
                while not server.released.is_set():
                    try:
                        data = self.connection.recv(1)
                    except TimeoutError:
                        continue
                    except OSError:
                        data = b""
                    if not data:
                        server.gone.put("gone")
                        break
                server.cuts = True

        return Handler
