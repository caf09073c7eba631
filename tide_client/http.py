"""The same stream over the OpenAI API, for `tide client --http`: standard library only.

Programs that use HTTP should use OpenAI's own client; this one exists to show exits. It never retries.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Mapping
from typing import Self, Unpack
from urllib.parse import urlsplit

from tide_client import openai_events
from tide_client.assembly import AnswerBuilder
from tide_client.errors import BadValueError, BrokenStreamError, StatusError, TideClientError, count, seconds
from tide_client.requests import Options, Prompt
from tide_client.results import Answer, Token
from tide_client.settings import DEFAULT_TIMEOUT_S, Settings, fits_a_header

MAX_LINE_BYTES = 2**20
MAX_BODY_BYTES = 2**20


class HttpClient:
    """The address and key of an OpenAI API; every call opens its own connection."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`url`: with or without the `/v1` that other clients need."""
        self._settings = Settings(api_key, timeout_s=timeout_s)
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https") or not fits_a_header(url):
            raise BadValueError(f"the address is {url!r}, expected one such as http://127.0.0.1:8000")
        self._is_safe = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to close: no connection stays open between calls."""

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> HttpStream:
        timeout_s = self._settings.timeout_of(options.get("timeout_s"))
        path, body = openai_events.request_of(prompt, options, timeout_s)
        return HttpStream(self._exchange("POST", path, timeout_s), body)

    def num_layers(self) -> int:
        """Layers of the served model."""
        exchange = self._exchange("GET", "/v1/models", self._settings.timeout_s)
        try:
            return openai_events.num_layers_of(exchange.open(None).read(MAX_BODY_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise exchange.failure(error) from None
        finally:
            exchange.close()

    def _exchange(self, method: str, path: str, timeout_s: float) -> Exchange:
        connect = http.client.HTTPSConnection if self._is_safe else http.client.HTTPConnection
        headers = {name.title(): value for name, value in self._settings.metadata}
        return Exchange(connect(self._host, self._port), method, self._path + path, headers, timeout_s)


class Exchange:
    """One request and its reply, until a deadline."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._connection, self._method, self._path, self._headers = connection, method, path, headers
        self._timeout_s, self._ends_at = timeout_s, time.monotonic() + timeout_s
        self._socket: socket.socket | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._busy = threading.Lock()
        self._is_closed = False

    def open(self, body: bytes | None) -> http.client.HTTPResponse:
        self._connection.timeout = self._left_s()
        self._connection.connect()
        self._socket = self._connection.sock  # the connection drops its reference once the reply begins
        if self._is_closed:
            raise TideClientError("closed before anything was sent")
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        self._connection.request(self._method, self._path, body, headers)
        self._reply = self._connection.getresponse()
        if self._reply.status != http.client.OK:
            message = openai_events.error_of(self._reply.read(MAX_BODY_BYTES))
            retry_after_s = seconds(self._reply.headers["Retry-After"])
            raise StatusError(f"HTTP {self._reply.status}", message or self._reply.reason, retry_after_s=retry_after_s)
        return self._reply

    def line(self, body: bytes) -> bytes:
        """The next line of the reply; empty at the end."""
        with self._busy:
            reply = self._reply or self.open(body)
            assert self._socket is not None
            self._socket.settimeout(self._left_s())
            return reply.readline(MAX_LINE_BYTES)

    def failure(self, error: Exception, num_tokens: int = 0) -> TideClientError:
        if isinstance(error, TimeoutError):
            return StatusError("DEADLINE_EXCEEDED", f"nothing came within {self._timeout_s:g} s", num_tokens)
        if isinstance(error, OSError):
            return StatusError("UNAVAILABLE", error.strerror or str(error), num_tokens)
        return BrokenStreamError(f"the reply broke off after {count(num_tokens)}: {type(error).__name__}")

    def close(self) -> None:
        """Shut the socket down. This wakes a reading thread, which then closes the connection."""
        self._is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._busy.acquire(blocking=False):
            self._connection.close()
            if self._reply is not None:
                self._reply.close()
            self._busy.release()

    def _left_s(self) -> float:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class HttpStream:
    """The tokens of one answer, each once; `answer` is complete after the last token."""

    def __init__(self, exchange: Exchange, body: bytes) -> None:
        self._exchange, self._body = exchange, body
        self._builder = AnswerBuilder()
        self._events = openai_events.Events(self._builder)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        return self._builder.answer

    def close(self) -> None:
        self._closed = True
        self._exchange.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while not self._closed:
            token = self._builder.next_token()
            if token is not None:
                return token
            if self._builder.is_over:
                break
            self._read()
        raise StopIteration

    def _read(self) -> None:
        try:
            line = self._exchange.line(self._body)
            if line:
                self._events.take(line)
            else:
                self._builder.end()
        except TideClientError as failure:
            self._builder.fail(failure)
        except (OSError, http.client.HTTPException) as error:
            self._builder.fail(self._exchange.failure(error, len(self._builder.tokens)))
        if self._closed or self._builder.is_over:
            self._exchange.close()
