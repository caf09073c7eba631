"""The functions that `grpc_options.grpc_servicer_functions` names. Each adds one service to a gRPC server of Serve.

Serve calls them in every replica, to which HAProxy sends all calls, and in every Python proxy. It routes the methods to
`TideServer` by their names and gives each call one of the replica's request slots, except for a service marked as
pass-through: its methods run on the server itself, next to the slots. In a replica that is so for health, which must
neither wait for a slot nor take one; a Python proxy does not know how its replicas are, so it routes health to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from deploy.failures import report
from deploy.grpc_api.health import Health
from tide.v1 import tide_pb2
from tide_core.errors import RequestError

TIDE = tide_pb2.DESCRIPTOR.services_by_name["TideService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

_of_this_replica: Health | None = None


class Undecodable:
    """Stands for a request whose bytes are no message of its type."""

    def __init__(self, message: str) -> None:
        self.message = message


def use_health(health: Health | None) -> None:
    """The health that this process reports. A replica sets it before Serve starts its server; there is one replica in a
    process, and Serve passes nothing of it to the functions below."""
    global _of_this_replica
    _of_this_replica = health


def add_tide(servicer: Any, server: Any) -> None:
    """`tide.v1.TideService`, on the methods of `GrpcApi`."""
    _add(server, TIDE.full_name, _handlers(TIDE, servicer))


def add_health(servicer: Any, server: Any) -> None:
    """`grpc.health.v1.Health`."""
    if _of_this_replica is not None:
        servicer = HealthOnServer(_of_this_replica, lambda: server._server.is_running())
        server.add_passthrough_service(HEALTH.full_name)
    _add(server, HEALTH.full_name, _handlers(HEALTH, servicer))


def add_reflection_v1(servicer: Any, server: Any) -> None:
    """`grpc.reflection.v1`, which newer clients ask for first, where `enable_reflection` is on: Serve itself adds
    v1alpha alone. Both versions have the same messages under two names."""
    names = (TIDE.full_name, HEALTH.full_name, REFLECTION_V1, reflection.SERVICE_NAME)
    info = reflection.aio.ReflectionServicer(names).ServerReflectionInfo

    async def info_if_enabled(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if reflection.SERVICE_NAME not in server._passthrough_service_names:  # Serve decides that after this function
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "reflection is off")
        async for reply in info(requests, context):
            yield reply

    handler = grpc.stream_stream_rpc_method_handler(
        info_if_enabled,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_passthrough_service(REFLECTION_V1)
    _add(server, REFLECTION_V1, {"ServerReflectionInfo": handler})


class HealthOnServer:
    """The methods of health as a gRPC server calls them, without Serve in between."""

    def __init__(self, health: Health, is_running: Callable[[], bool]) -> None:
        """`is_running`: false once the server stops. It waits for its open calls, so a watch must end by itself."""
        self._health, self._is_running = health, is_running

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckResponse:
        try:
            return self._health.check(decoded(request).service)
        except Exception as error:
            return await _abort(context, error)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> health_pb2.HealthListResponse:
        return self._health.list()

    async def Watch(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        try:
            watch = self._health.watch(decoded(request).service, context.peer(), self._is_running)
            async with contextlib.aclosing(watch):  # its place is free at once, not when it is collected
                async for state in watch:
                    yield state
        except Exception as error:
            await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> Any:
    failure = report(error)
    await context.abort(grpc.StatusCode[failure.grpc_code], failure.message)


def decoded(request: Any) -> Any:
    """The request, if its bytes could be decoded."""
    if isinstance(request, Undecodable):
        raise RequestError("request", "bytes that cannot be decoded", f"a {request.message}")
    return request


def _handlers(service: Any, servicer: Any) -> dict[str, Any]:
    """A handler for each method. What cannot be decoded reaches the method as `Undecodable`: gRPC itself would answer
    INTERNAL or UNKNOWN."""
    handlers = {}
    for method in service.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=_decoder(GetMessageClass(method.input_type), method.input_type.full_name),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


def _decoder(message_class: Any, name: str) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return Undecodable(name)

    return decode


def _add(server: Any, service: str, handlers: Mapping[str, Any]) -> None:
    """As generated code adds a service."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)
