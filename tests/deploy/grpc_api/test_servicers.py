"""Our services on the gRPC server that Serve runs in a replica: the real server class on loopback, with a handler in
place of the replica. Health answers beside the request slots, and every body gets a status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from ray.serve._private.grpc_util import enable_server_reflection, gRPCGenericServer

from deploy.failures import StatusSetError
from deploy.grpc_api import health, servicers
from deploy.grpc_api.health import Health
from deploy.grpc_api.servicers import Undecodable
from tests.deploy.in_process import Context, Grpc, make_service
from tide.v1 import tide_pb2 as pb
from tide.v1 import tide_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_A_MESSAGE = b"\xff\xff\xff\xff"
WAIT_S = 30.0
"""Bounds a hang."""


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
    def __init__(self, server: gRPCGenericServer, replica: Replica, address: str) -> None:
        self.server, self.replica, self.address = server, replica, address

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own."""
        return grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])


@contextlib.asynccontextmanager
async def served(own: Health | None, *functions: Callable[..., None]) -> AsyncIterator[Served]:
    servicers.use_health(own)
    replica = Replica()
    server = gRPCGenericServer(replica.handler)
    port = server.add_insecure_port("127.0.0.1:0")
    for function in functions or (servicers.add_tide, servicers.add_health):
        function(_Any(), server)
    await server.start()
    try:
        yield Served(server, replica, f"127.0.0.1:{port}")
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
    async with served(Health(lambda: None)) as it, it.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status == SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert (await watch.read()).status == SERVING
        watch.cancel()
        assert it.replica.routed == []


async def test_list_names_services_and_no_methods() -> None:
    async with served(Health(lambda: None)) as it, it.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        statuses = (await stub.List(health_pb2.HealthListRequest(), timeout=WAIT_S)).statuses
        assert {name: reply.status for name, reply in statuses.items()} == {"": SERVING, "tide.v1.TideService": SERVING}


async def test_an_unknown_service_is_not_found() -> None:
    async with served(Health(lambda: None)) as it, it.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watches_are_limited_per_connection_and_in_all_and_their_places_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 5)
    monkeypatch.setattr(health, "MAX_WATCHES_PER_CONNECTION", 3)
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.01)
    own = Health(lambda: None)

    async def opened(channel: grpc.aio.Channel) -> Any:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        try:
            assert (await watch.read()).status == SERVING
        except grpc.aio.AioRpcError as error:
            return error
        return watch

    async with served(own) as it, it.channel() as one, it.channel() as two:
        mine = [await opened(one) for _ in range(4)]
        assert mine[3].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of this connection" in mine[3].details()
        theirs = [await opened(two) for _ in range(3)]
        assert theirs[2].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of this replica" in theirs[2].details()
        reply = await health_pb2_grpc.HealthStub(one).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert reply.status == SERVING, "a single check is never refused"
        for watch in [*mine[:3], *theirs[:2]]:
            watch.cancel()
        async with asyncio.timeout(WAIT_S):
            while own._watches:
                await asyncio.sleep(0.01)
        assert isinstance(await opened(one), grpc.aio.UnaryStreamCall)


async def test_the_limits_are_those_that_the_documents_state() -> None:
    assert (health.MAX_WATCHES_PER_CONNECTION, health.MAX_WATCHES) == (16, 64)


async def test_a_server_that_stops_does_not_wait_for_its_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.01)
    async with served(Health(lambda: None)) as it, it.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(WAIT_S):
            await it.server.stop(10 * WAIT_S)
        assert await watch.code() is grpc.StatusCode.OK


async def test_a_python_proxy_routes_health_to_a_replica() -> None:
    async with served(None) as it, it.channel() as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"), timeout=WAIT_S)
        assert it.replica.routed == [("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="x"))]


async def test_a_request_reaches_the_replica_decoded_or_as_undecodable() -> None:
    async with served(Health(lambda: None)) as it, it.channel() as channel:
        stub: Any = tide_pb2_grpc.TideServiceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=WAIT_S)
        await channel.unary_unary("/tide.v1.TideService/Tokenize")(NOT_A_MESSAGE, timeout=WAIT_S)
        [good, bad] = it.replica.routed
        assert good == ("/tide.v1.TideService/Tokenize", pb.TokenizeRequest(text="hello"))
        assert isinstance(bad[1], Undecodable)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(NOT_A_MESSAGE, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_of_either_version_finds_the_service(version: str) -> None:
    def add_v1alpha(servicer: Any, server: gRPCGenericServer) -> None:
        enable_server_reflection(server)  # as `enable_reflection: true` does, after the functions of the config

    functions = (servicers.add_tide, servicers.add_health, servicers.add_reflection_v1, add_v1alpha)
    async with served(Health(lambda: None), *functions) as it, it.channel() as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=WAIT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"tide.v1.TideService", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="tide.v1.TideService"))
        pool = DescriptorPool()
        for file in (await call.read()).file_descriptor_response.file_descriptor_proto:
            pool.AddSerializedFile(file)
        assert pool.FindServiceByName("tide.v1.TideService").FindMethodByName("GenerateStream")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert it.replica.routed == []


async def test_reflection_is_off_in_both_versions_where_serve_has_it_off() -> None:
    async with served(None, servicers.add_tide, servicers.add_reflection_v1) as it, it.channel() as channel:
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
            )(timeout=WAIT_S)
            assert (
                await call.code() is grpc.StatusCode.UNIMPLEMENTED
            )  # without a message: it may come before one is sent
