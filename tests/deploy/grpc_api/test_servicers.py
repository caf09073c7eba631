"""Our services on the gRPC server that Serve runs in a replica: the real server class without a port, its methods
called as gRPC calls them, with a handler in place of the replica. Health answers beside the request slots, and every
body gets a status. tests/serve has the same over a network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from ray.serve._private.grpc_util import enable_server_reflection, gRPCGenericServer

from deploy.failures import StatusSetError
from deploy.grpc_api import health, servicers
from deploy.grpc_api.health import Health
from deploy.grpc_api.servicers import Undecodable
from tests.deploy.in_process import Context, Grpc, make_service
from tide.v1 import tide_pb2 as pb

pytestmark = pytest.mark.unit

SERVING = health_pb2.HealthCheckResponse.SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
ANY_SERVICE = health_pb2.HealthCheckRequest().SerializeToString()
NOT_A_MESSAGE = b"\xff\xff\xff\xff"
WAIT_S = 120.0
"""Bounds a hang."""


class AbortedError(Exception):
    """A call that ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class ServerContext:
    """What a gRPC server hands to a method that runs on it."""

    def __init__(self, connection: str = "one") -> None:
        self._connection = connection

    def peer(self) -> str:
        return self._connection

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AbortedError(code, details)


class Replica:
    """Answers what Serve would route to a replica, and remembers it."""

    def __init__(self) -> None:
        self.routed: list[tuple[str, Any]] = []

    def handler(self, service_method: str, streaming_type: Any) -> Callable[..., Any]:
        async def answer(request: Any, context: Any) -> bytes:
            self.routed.append((service_method, request))
            return b""

        return answer


class Served:
    """The server with its services, called without a network: bytes in, messages out."""

    def __init__(self, server: gRPCGenericServer, replica: Replica) -> None:
        self.server, self.replica = server, replica

    def handler(self, method: str) -> Any:
        """What the server has for a method; None if it has nothing and answers UNIMPLEMENTED."""
        asked: Any = SimpleNamespace(method=method, invocation_metadata=())
        found = (generic.service(asked) for [generic] in self.server.generic_rpc_handlers)
        return next((handler for handler in found if handler is not None), None)

    async def call(self, method: str, data: bytes) -> Any:
        handler = self.handler(method)
        return await handler.unary_unary(handler.request_deserializer(data), ServerContext())

    def watch(self, connection: str = "one") -> Any:
        handler = self.handler(WATCH)
        return handler.unary_stream(handler.request_deserializer(ANY_SERVICE), ServerContext(connection))


@contextlib.asynccontextmanager
async def served(own: Health | None, *functions: Callable[..., None]) -> AsyncIterator[Served]:
    servicers.use_health(own)
    replica = Replica()
    server = gRPCGenericServer(replica.handler)
    for function in functions or (servicers.add_tide, servicers.add_health):
        function(_Any(), server)
    await server.start()
    try:
        yield Served(server, replica)
    finally:
        await server.stop(None)


class _Any:
    """Serve's own servicer has every method and none does anything."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(autouse=True)
def _no_health_left() -> Iterator[None]:
    yield
    servicers.use_health(None)


async def test_health_of_a_replica_takes_no_request_slot() -> None:
    async with served(Health(lambda: None)) as it:
        assert (await it.call(CHECK, ANY_SERVICE)).status == SERVING
        watch = it.watch()
        assert (await anext(watch)).status == SERVING
        await watch.aclose()
        assert it.replica.routed == []


async def test_list_names_services_and_no_methods() -> None:
    async with served(Health(lambda: None)) as it:
        statuses = (await it.call("/grpc.health.v1.Health/List", b"")).statuses
        assert {name: reply.status for name, reply in statuses.items()} == {"": SERVING, "tide.v1.TideService": SERVING}


async def test_an_unknown_service_is_not_found() -> None:
    async with served(Health(lambda: None)) as it:
        with pytest.raises(AbortedError) as caught:
            await it.call(CHECK, health_pb2.HealthCheckRequest(service="other").SerializeToString())
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_watches_are_limited_per_connection_and_in_all_and_their_places_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 5)
    monkeypatch.setattr(health, "MAX_WATCHES_PER_CONNECTION", 3)

    async def opened(it: Served, connection: str) -> Any:
        watch = it.watch(connection)
        try:
            assert (await anext(watch)).status == SERVING
        except AbortedError as error:
            return error
        return watch

    async with served(Health(lambda: None)) as it:
        mine = [await opened(it, "one") for _ in range(4)]
        assert mine[3].code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of this connection" in mine[3].details
        theirs = [await opened(it, "two") for _ in range(3)]
        assert theirs[2].code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of this replica" in theirs[2].details
        assert (await it.call(CHECK, ANY_SERVICE)).status == SERVING, "a single check is never refused"
        for watch in [*mine[:3], *theirs[:2]]:
            await watch.aclose()
        again = [await opened(it, "one") for _ in range(3)]
        assert not any(isinstance(each, AbortedError) for each in again)
        for watch in again:
            await watch.aclose()


async def test_the_limits_are_those_that_the_documents_state() -> None:
    assert (health.MAX_WATCHES_PER_CONNECTION, health.MAX_WATCHES) == (16, 64)


async def test_a_watch_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops waits for its open calls."""
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.01)
    async with served(Health(lambda: None)) as it:
        watch = it.watch()
        assert (await anext(watch)).status == SERVING
        await it.server.stop(None)
        async with asyncio.timeout(WAIT_S):
            assert [state async for state in watch] == []


async def test_a_python_proxy_routes_health_to_a_replica() -> None:
    asked = health_pb2.HealthCheckRequest(service="x")
    async with served(None) as it:
        await it.call(CHECK, asked.SerializeToString())
        assert it.replica.routed == [(CHECK, asked)]


async def test_a_request_reaches_the_replica_decoded_or_as_undecodable() -> None:
    tokenize = "/tide.v1.TideService/Tokenize"
    async with served(Health(lambda: None)) as it:
        await it.call(tokenize, pb.TokenizeRequest(text="hello").SerializeToString())
        await it.call(tokenize, NOT_A_MESSAGE)
        [good, bad] = it.replica.routed
        assert good == (tokenize, pb.TokenizeRequest(text="hello"))
        assert isinstance(bad[1], Undecodable)
        with pytest.raises(AbortedError) as caught:
            await it.call(CHECK, NOT_A_MESSAGE)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_method_answers_what_cannot_be_decoded_with_invalid_argument() -> None:
    service = make_service()
    try:
        api: Any = Grpc(service)
        for method in (*servicers.TIDE.methods, *servicers.HEALTH.methods):
            if not method.input_type.fields:
                continue  # any bytes that are fields decode to it, and nothing is read from it
            context = Context()
            reply = getattr(api, method.name)(Undecodable(method.input_type.full_name), context)
            with pytest.raises(StatusSetError):
                await (anext(reply) if method.server_streaming else reply)
            assert context.status is grpc.StatusCode.INVALID_ARGUMENT, method.name
            assert method.input_type.full_name in context.text
    finally:
        service.engine.close()


def reflection_method(version: str) -> str:
    return f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"


async def each(*requests: Any) -> AsyncIterator[Any]:
    for request in requests:
        yield request


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_of_either_version_finds_the_service(version: str) -> None:
    def add_v1alpha(servicer: Any, server: gRPCGenericServer) -> None:
        enable_server_reflection(server)  # as `enable_reflection: true` does, after the functions of the config

    functions = (servicers.add_tide, servicers.add_health, servicers.add_reflection_v1, add_v1alpha)
    async with served(Health(lambda: None), *functions) as it:
        asked = (
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="tide.v1.TideService"),
        )
        replies = it.handler(reflection_method(version)).stream_stream(each(*asked), ServerContext())
        listed, files = [reply async for reply in replies]
        names = {service.name for service in listed.list_services_response.service}
        assert {"tide.v1.TideService", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names
        pool = DescriptorPool()
        for file in files.file_descriptor_response.file_descriptor_proto:
            pool.AddSerializedFile(file)
        assert pool.FindServiceByName("tide.v1.TideService").FindMethodByName("GenerateStream")
        assert it.replica.routed == []


async def test_reflection_is_off_in_both_versions_where_serve_has_it_off() -> None:
    async with served(None, servicers.add_tide, servicers.add_reflection_v1) as it:
        with pytest.raises(AbortedError) as caught:
            await anext(it.handler(reflection_method("v1")).stream_stream(each(), ServerContext()))
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert it.handler(reflection_method("v1alpha")) is None
