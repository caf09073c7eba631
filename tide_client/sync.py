"""The client for programs without an event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from tide.v1 import tide_pb2 as pb
from tide_client.assembly import AnswerBuilder, num_choices
from tide_client.connection import Connection
from tide_client.errors import TideClientError, status_error
from tide_client.requests import Chat, Options, Prompt, Tools, request_of, tokenize_request_of
from tide_client.results import (
    Answer,
    Delta,
    ExitStats,
    ModelInfo,
    Token,
    exit_stats_of,
    model_info_of,
    response_of,
)
from tide_client.retry import Retry, with_own_id
from tide_client.settings import (
    DEFAULT_ADDRESS,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    Attempts,
    Settings,
)
from tide_client.tls import Tls

Item = TypeVar("Item")


class TideClient:
    """One connection to a server. May be used by several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        resume: bool = False,
        tls: Tls | None = None,
        channel: grpc.Channel | None = None,
    ) -> None:
        """`resume`: streams that break after their first token are resumed, if their request is greedy or has a seed.
        `channel`: one to use instead of a new one to `address`."""
        self._settings = Settings(api_key, application, timeout_s, retries, resume)
        self._connection = Connection(grpc, address, tls, channel)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._closed = True
        for channel in self._connection.channels:
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The whole answer at once; with `n`, `answer.choices` has all of them."""
        timeout_s = self._settings.timeout_of(options.get("timeout_s"))
        request = request_of(prompt, options, timeout_s)
        return response_of(self._call("Generate", request, timeout_s), num_choices(request))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The tokens as they arrive. Closing the stream, or leaving its `with`, aborts the request."""
        timeout_s = self._settings.timeout_of(options.get("timeout_s"))
        request = request_of(prompt, options, timeout_s)
        return Stream(self._start, self._connection, request, self._settings, timeout_s)

    def model_info(self) -> ModelInfo:
        return model_info_of(self._call("GetModelInfo", pb.GetModelInfoRequest()))

    def exit_stats(self) -> ExitStats:
        return exit_stats_of(self._call("GetExitStats", pb.GetExitStatsRequest()))

    def abort(self, request_id: str) -> bool:
        """Abort a running request; False if there is none with this id."""
        reply: pb.AbortResponse = self._call("Abort", pb.AbortRequest(request_id=request_id))
        return reply.aborted

    def tokenize(self, prompt: str | Chat, tools: Tools = ()) -> list[int]:
        reply: pb.TokenizeResponse = self._call("Tokenize", tokenize_request_of(prompt, tools))
        return list(reply.ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        reply: pb.DetokenizeResponse = self._call("Detokenize", pb.DetokenizeRequest(ids=ids))
        return reply.text

    def _call(self, method: str, request: object, timeout_s: float | None = None) -> Any:
        attempts, first = Attempts(self._settings, timeout_s or self._settings.timeout_s), request
        while True:
            try:
                return self._start(method, request, attempts.left_s)
            except grpc.RpcError as error:
                pause_s = attempts.pause_s(status_error(error))
                if attempts.needs_another_channel:
                    self._connection.replace()
                if isinstance(first, pb.GenerateRequest):
                    request = with_own_id(first, attempts.num_retries)
            time.sleep(pause_s)

    def _start(self, method: str, request: object, timeout_s: float) -> Any:
        if self._closed:
            raise TideClientError("this client is closed")
        start = getattr(self._connection.stub, method)
        return start(request, timeout=timeout_s, metadata=self._settings.metadata)


class Stream:
    """The tokens of one answer, each once: an iterator, so a second loop continues where the first one stopped.
    `answer` is complete after the last token. The tokens of several choices come mixed, and each says its own. Another
    thread than the reading one may close it."""

    def __init__(
        self,
        start: Callable[..., Any],
        connection: Connection,
        request: pb.GenerateRequest,
        settings: Settings,
        timeout_s: float,
    ) -> None:
        """`start`: starts the call with this name, request and timeout, on the connection."""
        self._start, self._connection, self._attempts = start, connection, Attempts(settings, timeout_s)
        self._retry = Retry(request, resume=settings.resume)
        self._builder = AnswerBuilder.of(request)
        self._closed = threading.Event()
        self._call = start("GenerateStream", request, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        return self._builder.answer

    @property
    def request_id(self) -> str:
        """The id of the request, known from the first token on."""
        return self._builder.request_id

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        token = self._next(self._builder.next_token)
        if token is None:
            raise StopIteration
        return token

    def deltas(self) -> Iterator[Delta]:
        """Pieces of content and of tool calls as they become certain, instead of the tokens: read one or the other."""
        while (delta := self._next(self._builder.next_delta)) is not None:
            yield delta

    def _next(self, received: Callable[[], Item | None]) -> Item | None:
        """The next item, waiting for it; None at the end."""
        while not self._closed.is_set():
            item = received()
            if item is not None or self._builder.is_over:
                return item
            self._read()
        return None

    def _read(self) -> None:
        """Read one message, or the end."""
        try:
            self._builder.take(next(self._call))
        except StopIteration:
            self._builder.end()
        except grpc.RpcError as error:
            self._on_status(error)
        if self._builder.is_over:
            self._call.cancel()  # for a broken stream: the server must not continue it

    def _on_status(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        if self._builder.is_whole:  # the answer is complete: a late status changes nothing
            self._builder.end()
            return
        try:
            tokens = self._builder.tokens
            failure = status_error(error, len(tokens))
            pause_s = self._attempts.pause_s(failure, can_follow=self._retry.can_follow(tokens))
            if self._attempts.needs_another_channel:
                self._connection.replace()
            if not self._closed.wait(pause_s):
                self._start_again()
        except grpc.RpcError as next_error:  # of the tokenisation of the prompt
            self._on_status(next_error)
        except TideClientError as failure:
            self._builder.fail(failure)
        if self._closed.is_set():
            self._call.cancel()

    def _start_again(self) -> None:
        tokens = self._builder.tokens
        num_kept = self._retry.num_kept(tokens)
        ask = self._retry.needs_ids(num_kept)
        if ask is not None:
            self._retry.take_ids(self._start("Tokenize", ask, self._attempts.left_s))
        self._builder.restart(num_kept)
        self._call = self._start("GenerateStream", self._retry.next(tokens[:num_kept]), self._attempts.left_s)
