"""A service over a tiny engine, and both of its APIs called in process: ASGI messages and a gRPC context."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from deploy.config.args import Limits
from deploy.config.policy import LivePolicy
from deploy.grpc_api.api import GrpcApi
from deploy.http_api.api import build_api
from deploy.keys import KeyRing
from deploy.service import Service
from tests.engine.exit_engines import exit_engine
from tests.engine.runners import Gate, RunnerOf
from tide_core.batch import ScheduledBatch, StepResult

MODEL = "tiny"


def make_service(
    *,
    keys: KeyRing | None = None,
    policy: LivePolicy | None = None,
    limits: Limits | None = None,
    step_s: float = 0.0,
    gate: Gate | None = None,
    other_names: Sequence[str] = (),
    **settings: Any,
) -> Service:
    """`step_s` makes every engine step take at least that long; `gate` holds the steps."""
    engine = exit_engine(**settings)
    if gate is not None:
        gate.hold(engine)
    elif step_s:
        run = engine._parts.runner.run

        def slowly(batch: ScheduledBatch) -> StepResult:
            time.sleep(step_s)
            return run(batch)

        engine._parts.core._runner = RunnerOf(slowly)
    return Service(engine, model=MODEL, other_names=other_names, limits=limits, keys=keys, policy=policy)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream; the last one must be the end."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        data = [part.removeprefix("data: ") for part in parts[:-1]]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class Http:
    """Calls the HTTP API of a service."""

    def __init__(self, service: Service, *, playground: bool = True, **settings: Any) -> None:
        self.api = build_api(service, playground=playground, **settings)

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, raw: bytes = b""
    ) -> Reply:
        data = raw if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        return await self.send(method, path, pairs, [data])

    async def send(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        body: list[bytes],
        gone: bool = False,
        prefix: str = "",
    ) -> Reply:
        incoming: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": index + 1 < len(body)}
            for index, part in enumerate(body)
        ]
        if gone:
            incoming.append({"type": "http.disconnect"})
        out: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await asyncio.sleep(3600)
            raise AssertionError

        async def send(message: Any) -> None:
            out.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": prefix,
            "scheme": "http",
            "query_string": b"",
            "headers": headers,
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await self.api(scope, receive, send)  # type: ignore[arg-type]
        start = out[0]
        return Reply(
            start["status"],
            {name.decode(): value.decode() for name, value in start["headers"]},
            b"".join(message.get("body", b"") for message in out[1:]),
        )


@dataclass
class Context:
    """What Serve hands to a gRPC method."""

    metadata: list[tuple[str, str]] = field(default_factory=list)
    status: grpc.StatusCode = grpc.StatusCode.OK
    text: str = ""
    trailing: list[tuple[str, str]] = field(default_factory=list)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, text: str) -> None:
        self.text = text

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self.trailing

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = metadata


class Grpc(GrpcApi):
    """The gRPC API of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service


async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [message async for message in stream]
