"""What the Service of Kubernetes does for clients: a connection goes to a node whose probe answers, and stays there.

Every client has an entrance of its own, so that it can be told which node its connection went to.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

PROBE_EVERY_S, PROBE_TIMEOUT_S = 5.0, 2.0
"""Of a worker's readiness, as KubeRay sets them; one failure is enough."""
PROBE = b"GET /-/healthz HTTP/1.0\r\n\r\n"
CHUNK_BYTES = 2**16


class Entrance:
    """A port for one client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.node = ""
        """Address of the node that the last connection went to."""


class Door:
    def __init__(self, nodes: Callable[[], Sequence[str]], http_port: int, grpc_port: int) -> None:
        """`nodes`: addresses of the nodes there are, dead ones among them until the probe tells."""
        self._nodes, self._http_port, self._grpc_port = nodes, http_port, grpc_port
        self._ready: list[str] = []
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._probing = asyncio.run_coroutine_threadsafe(self._probe_all(), self._loop)

    @property
    def ready(self) -> list[str]:
        """Addresses of the nodes that get connections."""
        return list(self._ready)

    def entrance(self) -> Entrance:
        opened: Entrance = self._run(self._open())
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
        except OSError:  # a TimeoutError is one
            return False

    async def _open(self) -> Entrance:
        entrance = Entrance("")

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # the door is closed
                await self._pass_on(entrance, reader, writer)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        entrance.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return entrance

    async def _pass_on(
        self, entrance: Entrance, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(to_client):
            if not self._ready:
                return
            self._turn += 1
            entrance.node = self._ready[self._turn % len(self._ready)]
            try:
                from_node, to_node = await asyncio.open_connection(entrance.node, self._grpc_port)
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
def door(nodes: Callable[[], Sequence[str]], http_port: int, grpc_port: int) -> Iterator[Door]:
    opened = Door(nodes, http_port, grpc_port)
    try:
        yield opened
    finally:
        opened.close()
