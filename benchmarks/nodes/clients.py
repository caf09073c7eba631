"""Clients of a service on several nodes, and the load balancer that they connect through.

The load balancer works like a Kubernetes Service: a connection goes to a node whose probe succeeds, and stays there.
Every client has its own endpoint, so that the node of each connection is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.nodes.cluster import API_KEY
from tide_client import TideClient, TideClientError
from tide_client.settings import DEFAULT_RETRIES

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before each attempt after the first one, for an answer that broke off; a partial answer is dropped. A minute in all:
on a busy machine a probe may fail on every node, and gRPC then waits some seconds between two connections."""
PROBE_EVERY_S, PROBE_TIMEOUT_S = 5.0, 2.0
"""Probe of a worker's readiness, as KubeRay sets it; one failure is enough."""
PROBE = b"GET /-/healthz HTTP/1.0\r\n\r\n"
CHUNK_BYTES = 2**16


class Endpoint:
    """A port of the load balancer for one client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.node = ""
        """Address of the node of the last connection."""


class LoadBalancer:
    def __init__(self, nodes: Callable[[], Sequence[str]], http_port: int, grpc_port: int) -> None:
        """`nodes`: addresses of all nodes, including dead ones; the probe leaves those out."""
        self._nodes, self._http_port, self._grpc_port = nodes, http_port, grpc_port
        self._ready: list[str] = []
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._probing = asyncio.run_coroutine_threadsafe(self._probe_all(), self._loop)

    @property
    def ready(self) -> list[str]:
        """Addresses of the nodes that receive connections."""
        return list(self._ready)

    def endpoint(self) -> Endpoint:
        opened: Endpoint = self._run(self._open())
        return opened

    def close(self) -> None:
        self._probing.cancel()
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _stop(self) -> None:
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_all(self) -> None:
        while True:
            nodes = list(self._nodes())
            answers = await asyncio.gather(*(self._answers(node) for node in nodes))
            self._ready = [node for node, answer in zip(nodes, answers, strict=True) if answer]
            await asyncio.sleep(PROBE_EVERY_S if self._ready else 0.5)

    async def _answers(self, node: str) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(node, self._http_port)
                writer.write(PROBE)
                line = await reader.readline()
                writer.close()
                return b" 200 " in line
        except OSError:  # includes TimeoutError
            return False

    async def _open(self) -> Endpoint:
        endpoint = Endpoint("")

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # the load balancer is closed
                await self._forward(endpoint, reader, writer)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        endpoint.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return endpoint

    async def _forward(
        self, endpoint: Endpoint, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(to_client):
            if not self._ready:
                return
            self._turn += 1
            endpoint.node = self._ready[self._turn % len(self._ready)]
            try:
                from_node, to_node = await asyncio.open_connection(endpoint.node, self._grpc_port)
            except OSError:
                return
            with contextlib.closing(to_node):
                ways = [
                    asyncio.create_task(_copy(from_client, to_node)),
                    asyncio.create_task(_copy(from_node, to_client)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def load_balancer(nodes: Callable[[], Sequence[str]], http_port: int, grpc_port: int) -> Iterator[LoadBalancer]:
    opened = LoadBalancer(nodes, http_port, grpc_port)
    try:
        yield opened
    finally:
        opened.close()


@dataclass(slots=True)
class Attempt:
    """One stream."""

    started_at: float
    proxy: str = ""
    """Address of the node whose HAProxy it went through."""
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    first_at: float | None = None
    ended_at: float | None = None
    error: str | None = None

    def is_open_at(self, moment: float) -> bool:
        return self.started_at < moment and (self.ended_at is None or self.ended_at > moment)


@dataclass(slots=True)
class ClientRequest:
    """One request of a client: attempts until an answer was complete or the client gave up."""

    prompt: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.attempts[-1].error is None


class Client(threading.Thread):
    """Requests one answer after another until `stop`, and records every token. It has its own connection, as another
    process would have."""

    def __init__(
        self,
        load_balancer: LoadBalancer,
        prompts: Iterable[str],
        *,
        retries: bool = True,
        pause_s: float = 0.0,
        **options: Any,
    ) -> None:
        """`retries`: use the retries of `TideClient` before a first token, and request an answer again that broke off
        after one."""
        super().__init__(daemon=True)
        self.requests: list[ClientRequest] = []
        self._endpoint: Endpoint = load_balancer.endpoint()
        self._prompts, self._options, self._pause_s = prompts, options, pause_s
        self._pauses_s = PAUSES_S if retries else ()
        self._stop_requests = threading.Event()
        self._client = TideClient(self._endpoint.address, api_key=API_KEY, retries=DEFAULT_RETRIES if retries else 0)

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for request in self.requests for attempt in request.attempts]

    @property
    def has_a_token(self) -> bool:
        """True if the current answer has a token."""
        attempts = self.attempts
        return bool(attempts and attempts[-1].ids)

    def run(self) -> None:
        with self._client:
            for prompt in self._prompts:
                self._request(prompt)
                if self._stop_requests.wait(self._pause_s):
                    return

    def stop(self) -> None:
        """The current answer is the last one."""
        self._stop_requests.set()

    def _request(self, prompt: str) -> None:
        request = ClientRequest(prompt)
        for pause_s in (0.0, *self._pauses_s):
            time.sleep(pause_s)
            attempt = Attempt(time.monotonic())
            request.attempts.append(attempt)
            if len(request.attempts) == 1:
                self.requests.append(request)
            self._try(prompt, attempt)
            if attempt.error is None:
                return

    def _try(self, prompt: str, attempt: Attempt) -> None:
        try:
            with self._client.stream(prompt, ignore_eos=True, **self._options) as stream:
                for token in stream:
                    if not attempt.ids:
                        attempt.request_id, attempt.proxy = stream.request_id, self._endpoint.node
                        attempt.first_at = time.monotonic()
                    attempt.ids.append(token.id)
        except TideClientError as error:
            attempt.error = str(error)
        attempt.proxy = attempt.proxy or self._endpoint.node
        attempt.ended_at = time.monotonic()


def end(clients: Sequence[Client]) -> None:
    """Stop all clients and wait for their current answers."""
    for client in clients:
        client.stop()
    for client in clients:
        client.join()


def in_turn(prompts: Sequence[str], first: int) -> Iterable[str]:
    """All prompts in a loop, starting with index `first`."""
    return itertools.islice(itertools.cycle(prompts), first % len(prompts), None)


def num_wrong(attempts: Iterable[Attempt], expected: Sequence[int]) -> int:
    """Number of tokens, of complete and of broken answers, that differ from full depth."""
    return sum(
        token != wanted for attempt in attempts for token, wanted in zip(attempt.ids, expected, strict=False)
    ) + sum(max(0, len(attempt.ids) - len(expected)) for attempt in attempts)
