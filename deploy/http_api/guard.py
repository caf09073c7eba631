"""ASGI middleware before every HTTP route: it checks sizes, the caller's key and the JSON body, and turns every error
into a response. Nothing else is stored or computed for a request before it passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.config.args import Limits
from deploy.failures import DeadlineError, Failure, TooLargeError, report
from deploy.http_api.reply_objects import error_object
from deploy.keys import Caller
from deploy.service import Service
from deploy.strict import json_body
from tide_core.errors import RequestError

LARGE_BODY_BYTES = 2**16
"""A body above it is parsed in a thread, so that streams go on meanwhile."""
SLOW_S = 1.0
CLIENT_GONE = 499
"""No client receives this status; it appears in logs."""


IGNORED_HEADER = b"x-tide-ignored"
"""Names the fields of the body that are not known here."""


class ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


class HttpError(Exception):
    """A failure that exists only over HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        code = "INVALID_ARGUMENT" if status < 500 else "INTERNAL"
        self.failure = Failure(status, code, "invalid_request_error", None, message)


class Guard:
    """ASGI middleware for the routes of one service."""

    def __init__(self, app: ASGIApp, *, service: Service, open_paths: frozenset[str]) -> None:
        self._app, self._service, self._open_paths = app, service, open_paths
        self._arriving = Arriving(service.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if ignored := scope.get("tide", {}).get("ignored"):
                    message["headers"] = [*message.get("headers", ()), (IGNORED_HEADER, ignored.encode())]
            await send(message)

        try:
            await self._admit(scope, receive)
            await self._app(scope, receive, watched_send)
        except ClientGoneError:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            if started:
                raise  # too late for a status: the server closes the connection, and the client sees a broken answer
            await response_to(error)(scope, receive, watched_send)

    async def _admit(self, scope: Scope, receive: Receive) -> None:
        """Check a request, and store its caller and parsed body in the scope for the routes."""
        limits, headers = self._service.limits, scope["headers"]
        if len(headers) > limits.num_headers or sum(len(k) + len(v) for k, v in headers) > limits.header_bytes:
            raise HttpError(431, f"at most {limits.num_headers} headers of {limits.header_bytes} bytes together")
        known = {bytes(name).lower(): bytes(value) for name, value in headers}
        if sum(bytes(name).lower() == b"authorization" for name, _ in headers) > 1:
            raise HttpError(400, "at most one Authorization header")
        caller, is_open = Caller(), _route_path(scope) in self._open_paths
        if not is_open:
            authorization = known.get(b"authorization")
            caller = self._service.keys.caller(None if authorization is None else authorization.decode("latin-1"))
        scope["tide"] = {"caller": caller}
        if scope["method"] == "POST" and not is_open:  # POST /ping has no body
            body = await self._body(known, receive)
            if len(body) > LARGE_BODY_BYTES:
                scope["tide"]["body"] = await asyncio.to_thread(json_body.parse, body, limits.json_depth)
            else:
                scope["tide"]["body"] = json_body.parse(body, limits.json_depth)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise HttpError(415, "the body must be JSON, sent with Content-Type: application/json")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise HttpError(415, "the body must not be compressed")
        limits = self._service.limits
        too_large = TooLargeError("body", f"more than {limits.body_bytes} bytes", "a smaller body")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limits.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with self._arriving.timeout():
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limits.body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise DeadlineError(
                f"the body did not arrive within {limits.body_timeout_s:g} s, or {SLOW_S:g} s while many are slow"
            ) from None


class Arriving:
    """Time limits of bodies that are arriving. One that takes its time holds a place of the replica meanwhile, so only
    `slow_bodies` of them get the whole time; when there are more, the oldest get a second."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._patient: dict[asyncio.Timeout, float] = {}
        """Those with the whole time, oldest first, and when each began."""

    @contextlib.asynccontextmanager
    async def timeout(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the block when the time of its body is over."""
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(begun + self._limits.body_timeout_s) as own:
            self._patient[own] = begun
            if len(self._patient) > self._limits.slow_bodies:
                oldest = next(iter(self._patient))
                soon = max(begun, self._patient.pop(oldest) + SLOW_S)
                oldest.reschedule(min(soon, oldest.when() or soon))
            try:
                yield
            finally:
                self._patient.pop(own, None)


def _route_path(scope: Scope) -> str:
    """The path without the prefix that the application is served under, as in the routes."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def caller_of(request: Request) -> Caller:
    caller = request.scope["tide"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def body_of(request: Request) -> Any:
    """The parsed body of a request that passed the guard."""
    body = request.scope["tide"]["body"]
    if not isinstance(body, dict):
        raise RequestError("body", type(body).__name__, "a JSON object")
    return body


def response_to(error: Exception) -> Response:
    failure = error.failure if isinstance(error, HttpError) else report(error)
    headers = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_object(failure), failure.status, headers)
