from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import _restore_logging, stdin, tide  # noqa: F401  # fixtures
from tests.client.scripted import PATIENCE_S, GrpcServer, Script
from tests.client.scripted_http import HttpServer
from tide_client import Answer, AsyncTideClient, TideClient, TideClientError, Token

TIDE = str(Path(sys.executable).with_name("tide"))


@dataclass
class Outcome:
    """What a caller saw of one stream."""

    tokens: list[Token] = field(default_factory=list)
    answer: Answer | None = None
    error: TideClientError | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


OnToken = Callable[[int], None]
"""Called with the number of tokens that came."""


def read_sync(
    address: str, *, retries: int = 3, resume: bool = False, on_token: OnToken = id, prompt: Any = "Say", **options: Any
) -> Outcome:
    seen = Outcome()
    with (
        TideClient(address, retries=retries, resume=resume) as client,
        client.stream(prompt, **options) as stream,
    ):
        try:
            for token in stream:
                seen.tokens.append(token)
                on_token(len(seen.tokens))
            seen.answer = stream.answer
        except TideClientError as error:
            seen.error = error
    return seen


def read_async(
    address: str, *, retries: int = 3, resume: bool = False, on_token: OnToken = id, prompt: Any = "Say", **options: Any
) -> Outcome:
    seen = Outcome()

    async def read() -> None:
        async with (
            AsyncTideClient(address, retries=retries, resume=resume) as client,
            client.stream(prompt, **options) as stream,
        ):
            try:
                async for token in stream:
                    seen.tokens.append(token)
                    on_token(len(seen.tokens))
                seen.answer = stream.answer
            except TideClientError as error:
                seen.error = error

    asyncio.run(read())
    return seen


def call_sync(address: str, method: str, *args: Any, **options: Any) -> Any:
    with TideClient(address) as client:
        return getattr(client, method)(*args, **options)


def call_async(address: str, method: str, *args: Any, **options: Any) -> Any:
    async def call() -> Any:
        async with AsyncTideClient(address) as client:
            return await getattr(client, method)(*args, **options)

    return asyncio.run(call())


@pytest.fixture(params=[read_sync, read_async], ids=["sync", "async"])
def read(request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """Read a stream to its end with either client."""
    return request.param


@pytest.fixture(params=[call_sync, call_async], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a method of either client."""
    return request.param


@pytest.fixture(autouse=True)
def _no_proxies_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "TIDE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    server = GrpcServer()
    yield server
    server.stop()


@pytest.fixture
def script(server: GrpcServer) -> Script:
    return server.script


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    with HttpServer() as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `tide client …` with Ctrl-C as on a terminal; it does not outlive its test. No code of ours runs between
    fork and exec: the gRPC server of the test has threads and locks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored, children ignore too
    started: list[subprocess.Popen[str]] = []

    def run(*args: str) -> subprocess.Popen[str]:
        command = [TIDE, "client", *args]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    signal.signal(signal.SIGINT, before)
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def tide_client() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `tide client …` as a shell would."""

    def run(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([TIDE, "client", *args], capture_output=True, text=True, timeout=PATIENCE_S, **settings)

    return run
