"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from tide.v1 import tide_pb2 as pb
from tide.v1 import tide_pb2_grpc
from tide_client.errors import TideClientError, status_error
from tide_client.pieces import Pieces
from tide_client.requests import Chat, Options, Prompt, request_of, tokenize_request_of
from tide_client.results import Answer, ExitStats, ModelInfo, Token, exit_stats_of, model_info_of, response_of
from tide_client.retries import Attempts
from tide_client.settings import DEFAULT_ADDRESS, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Settings, channel_options


class AsyncTideClient:
    """One connection to a server, for one event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`channel`: one of your own, such as one with TLS; then `address` is not used."""
        self._settings = Settings(api_key, application, timeout_s, retries)
        self._channel = channel or grpc.aio.insecure_channel(address, options=channel_options())
        self._stub: Any = tide_pb2_grpc.TideServiceStub(self._channel)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends whatever still runs."""
        self._closed = True
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The whole answer at once."""
        timeout_s = self._settings.timeout_of(options.get("timeout_s"))
        return response_of(await self._call(self._stub.Generate, request_of(prompt, options, timeout_s), timeout_s))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The tokens as they come. Closing the stream, or leaving its `async with`, ends the request on the server."""
        timeout_s = self._settings.timeout_of(options.get("timeout_s"))
        request = request_of(prompt, options, timeout_s)

        def start(left_s: float) -> Any:
            return self._start(self._stub.GenerateStream, request, left_s)

        return AsyncStream(start, self._settings, timeout_s)

    async def model_info(self) -> ModelInfo:
        return model_info_of(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def exit_stats(self) -> ExitStats:
        return exit_stats_of(await self._call(self._stub.GetExitStats, pb.GetExitStatsRequest()))

    async def abort(self, request_id: str) -> bool:
        """End a running request; False if there is none of that name."""
        reply: pb.AbortResponse = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return reply.aborted

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        reply: pb.TokenizeResponse = await self._call(self._stub.Tokenize, tokenize_request_of(prompt))
        return list(reply.ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        reply: pb.DetokenizeResponse = await self._call(self._stub.Detokenize, pb.DetokenizeRequest(ids=ids))
        return reply.text

    async def _call(self, method: Callable[..., Any], request: object, timeout_s: float | None = None) -> Any:
        attempts = Attempts(self._settings, timeout_s or self._settings.timeout_s)
        while True:
            try:
                return await self._start(method, request, attempts.left_s)
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.pause_s(status_error(error))
            except asyncio.CancelledError:
                raise_if_cancelled()
                raise TideClientError("the client was closed") from None
            await asyncio.sleep(pause_s)

    def _start(self, method: Callable[..., Any], request: object, timeout_s: float) -> Any:
        if self._closed:
            raise TideClientError("this client is closed")
        return method(request, timeout=timeout_s, metadata=self._settings.metadata)


class AsyncStream:
    """The tokens of one answer, each once: an iterator, so a loop that was left early goes on where it stopped.
    `answer` holds all of it once the last one has come."""

    def __init__(self, start: Callable[[float], Any], settings: Settings, timeout_s: float) -> None:
        self._start, self._attempts = start, Attempts(settings, timeout_s)
        self._pieces = Pieces()
        self._closed = asyncio.Event()
        self._call = start(timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        return self._pieces.answer

    @property
    def request_id(self) -> str:
        """The name of the request, from the first token on."""
        return self._pieces.request_id

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while not self._closed.is_set():
            token = self._pieces.next_token()
            if token is not None:
                return token
            if self._pieces.is_over:
                break
            await self._read()
        raise StopAsyncIteration

    async def _read(self) -> None:
        """One message, or the end."""
        try:
            chunk = await self._call.read()
            if chunk is grpc.aio.EOF:
                self._pieces.end()
            else:
                self._pieces.take(chunk)
        except grpc.aio.AioRpcError as error:
            await self._on_status(error)
        except asyncio.CancelledError:  # the library says so of the call and of the task alike
            self._pieces.fail(TideClientError("the call was cancelled while it was read"))
            raise_if_cancelled()
        if self._pieces.is_over:
            self._call.cancel()  # of a broken stream, so that the server does not go on with it

    async def _on_status(self, error: grpc.aio.AioRpcError) -> None:
        if self._pieces.is_whole:  # the last word had come: there was nothing left to lose
            self._pieces.end()
            return
        try:
            pause_s = self._attempts.pause_s(status_error(error, len(self._pieces.tokens)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause_s)
            if not self._closed.is_set():
                self._pieces.begin_again()
                self._call = self._start(self._attempts.left_s)
        except TideClientError as failure:
            self._pieces.fail(failure)


def raise_if_cancelled() -> None:
    """Pass on a CancelledError that was meant for the task that runs."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
