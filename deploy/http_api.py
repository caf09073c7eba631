"""The HTTP face of one engine: routes, streams, and the one handler through which every error leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai_api import (
    DONE_EVENT,
    CompletionRequest,
    CompletionShape,
    ErrorReply,
    ModelNotFoundError,
    error_reply,
    http_reply,
    model_list,
    raise_if_failed,
    sse_event,
    validation_reply,
)
from tide_core.errors import EngineDeadError
from tide_core.request import RequestOutput

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine

logger = logging.getLogger("ray.serve")
T = TypeVar("T")
Outputs = AsyncGenerator[RequestOutput, None]

CLIENT_GONE = 499
"""Nobody reads this status; logs show it."""


def build_api(engine: Engine, model: str) -> FastAPI:
    """Routes over `engine`, which clients know as `model`."""
    api = FastAPI(title="TIDE Serve", docs_url=None, redoc_url=None)
    api.add_middleware(ErrorBoundary)
    api.add_exception_handler(RequestValidationError, _on_invalid_body)
    api.add_exception_handler(HTTPException, _on_http_error)
    created = int(time.time())

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        if body.model not in (None, model):
            raise ModelNotFoundError(f"model: this server has {model}")
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        shape = CompletionShape(completion_id, model, body.wants_exit_layers)
        outputs = engine.stream(body.prompt, body.sampling_params(), request_id=completion_id)
        if body.stream:
            # Errors that come before the first token still have a status of their own.
            first = await unless_gone(request, _next(outputs))
            return EventStream(_events(shape, first, outputs), outputs)
        async with contextlib.aclosing(outputs):
            return JSONResponse(shape.whole(await unless_gone(request, _all(outputs))))

    @api.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(model_list(model, created))

    @api.get("/health")
    async def health() -> Response:
        if engine.stats().dead:
            raise EngineDeadError("found by /health")
        return JSONResponse({"status": "ok"})

    return api


async def _next(outputs: Outputs) -> RequestOutput:
    output = await anext(outputs)
    raise_if_failed(output)
    return output


async def _all(outputs: Outputs) -> list[RequestOutput]:
    collected = []
    async for output in outputs:
        raise_if_failed(output)
        collected.append(output)
    return collected


async def _events(shape: CompletionShape, first: RequestOutput, outputs: Outputs) -> AsyncIterator[bytes]:
    """The answer as events. It is whole only if `[DONE]` came; a failure is an event with an error, and the end."""
    try:
        yield sse_event(shape.chunk(first))
        async for output in outputs:
            raise_if_failed(output)
            yield sse_event(shape.chunk(output))
    except Exception as error:
        yield sse_event(reply_to(error).body)
    else:
        yield DONE_EVENT


class EventStream(StreamingResponse):
    """Events over the outputs of an engine. However the response ends, the outputs are closed: that aborts a request
    whose client has gone, even one that went before the first event."""

    def __init__(self, events: AsyncIterator[bytes], outputs: Outputs) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ErrorBoundary:
    """The outermost handler: no exception passes it with a text of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGoneError:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise  # too late for a status: the server cuts the connection, and the client sees a broken answer
            await _response(reply_to(error))(scope, receive, send)


def reply_to(error: Exception) -> ErrorReply:
    """The reply for `error`; if it is our fault, its cause goes to the log under the id the client gets."""
    error_id = uuid.uuid4().hex[:16]
    reply = error_reply(error, error_id)
    if reply.is_ours:
        logger.error("error %s", error_id, exc_info=error)
    return reply


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if "json" not in request.headers.get("content-type", ""):
        return _response(http_reply(415, "the body must be JSON, sent with Content-Type: application/json"))
    return _response(validation_reply(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _response(http_reply(error.status_code, error.detail, error.headers))


def _response(reply: ErrorReply) -> Response:
    return JSONResponse(reply.body, reply.status, reply.headers)
